"""Counts which backend's `forward` ran, by its package; a `setup` of traffic.py whose worker is that process itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

_ran: Counter[str] = Counter()


def install() -> None:
    """Count every call of the two backends that there are on the CPU."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from atom_patches.vllm.adapters.paged_attention import AtomPagedImpl

    _ran.clear()
    for backend in (CPUAttentionBackendImpl, AtomPagedImpl):
        if not hasattr(backend.forward, "counted"):
            backend.forward = _counted(backend.forward, backend.__module__.partition(".")[0])


def _counted(forward: Any, package: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        _ran[package] += 1
        return forward(*args, **kwargs)

    call.counted = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def report() -> dict[str, int]:
    """Calls by package."""
    return dict(_ran)
