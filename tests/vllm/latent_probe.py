"""What attention to latents did, with pieces of two pages; a `setup` of traffic.py whose worker is that process itself.

vLLM's CPU platform turns chunked prefills off where attention is to latents, and a step takes any prompt whole. On
GPUs it does not: `ChunkedScheduler` cuts prompts as it would there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from atom_patches.runtime.latent_pieces import PAGE
from atom_patches.vllm.adapters import latent_attention

STEP = 96
_seen: Counter[str] = Counter()


class ChunkedScheduler(Scheduler):
    """Steps of at most `STEP` tokens."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.enable_chunked_prefill = True
        vllm_config.scheduler_config.max_num_scheduled_tokens = STEP
        super().__init__(vllm_config, *args, **kwargs)


def install() -> None:
    """Note every step from now on."""
    _seen.clear()
    latent_attention.LEAST_ROOM = 2 * PAGE
    impl: Any = latent_attention.AtomLatentImpl
    if not hasattr(impl.forward_mqa, "noted"):
        impl.forward_mqa, impl.forward_mha = _noted(impl.forward_mqa, _few), _noted(impl.forward_mha, _many)


def _few(step: latent_attention.AtomLatentMetadata) -> None:
    _seen["few rows"] += 1
    _seen["few rows of several"] += any(some.most_rows > 1 for some in step.decode)
    _seen["beside prefills"] += step.num_prefills > 0


def _many(step: latent_attention.AtomLatentMetadata) -> None:
    _seen["prefills"] += 1
    _seen["most pieces"] = max(_seen["most pieces"], sum(not piece.causal for piece in step.pieces))


def _noted(function: Any, note: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(next(x for x in (*args, *kwargs.values()) if isinstance(x, latent_attention.AtomLatentMetadata)))
        return function(*args, **kwargs)

    call.noted = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def report() -> dict[str, int]:
    """Calls of layers by kind, and the most pieces of what was cached before a chunk."""
    return dict(_seen)
