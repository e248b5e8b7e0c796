"""Prefill context parallelism for hybrid and dense models: the rows of a prefill are spread over ranks."""
