"""Prefill context parallelism on the model runner that has a manager of its own for it (vLLM 0.32 and 0.33)."""
