"""Which number formats of weights and of the KV cache prefill context parallelism serves.

Imports neither torch nor vLLM: the parent process decides here before an engine exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNQUANTISED = frozenset({"auto", "bfloat16", "float16"})
"""Types of the KV cache that keep keys and values as they are."""

FP8_CACHES = frozenset({"fp8", "fp8_e4m3"})
"""Types of the KV cache with one scale a layer, which is the same on every rank.

`fp8_e5m2` is not among them: vLLM 0.20.2's FLASH_ATTN refuses it, and its attention layer stops where the backend takes
quantised queries, as TRITON_ATTN does.
"""


def unserved_formats(config: VllmConfig) -> Iterator[str]:
    """One line for each format that cannot be served together with prefill context parallelism."""
    yield from _unserved_weights(config)
    yield from _unserved_cache(config)


def _unserved_weights(config: VllmConfig) -> Iterator[str]:
    found, device = config.model_config.quantization, config.device_config.device_type
    if found is None:
        return
    if found != "fp8":
        yield f"--quantization is {found}; served are unquantised checkpoints and fp8"
    elif device != "cuda":
        yield f"--quantization is fp8, which is served on GPUs only, not on {device}; use an unquantised checkpoint"


def _unserved_cache(config: VllmConfig) -> Iterator[str]:
    cache: Any = config.cache_config
    found, device = cache.cache_dtype, config.device_config.device_type
    served = UNQUANTISED | FP8_CACHES if device == "cuda" else UNQUANTISED
    if found not in served:
        yield f"--kv-cache-dtype is {found}; served on {device} are {', '.join(sorted(served))}"
