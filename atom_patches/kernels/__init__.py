"""Operations that hybrid and sparse models need, one package each; no engine is imported here.

Every package states its schema (shapes, dtypes, padding rules, tolerance) in its `__init__`, and holds a
plain torch `reference`, which is what faster providers are tested against.
"""
