"""Counts which backend's `forward` ran, by its package, and writes to the cache that ours was asked for.

A `setup` of traffic.py whose worker is that process itself.
"""

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
    if not hasattr(AtomPagedImpl.do_kv_cache_update, "counted"):
        AtomPagedImpl.do_kv_cache_update = _counted(AtomPagedImpl.do_kv_cache_update, "writes")


def _counted(function: Any, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        _ran[name] += 1
        return function(*args, **kwargs)

    call.counted = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def report() -> dict[str, int]:
    """Calls by name."""
    return dict(_ran)
