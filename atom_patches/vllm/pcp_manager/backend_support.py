"""Attention backends whose cache write gathers are accepted under prefill context parallelism.

Why:         vLLM asks every attention backend whether it supports prefill context parallelism itself, and only those of
             latent attention do. With gathered keys and values a backend has nothing to support.
How:         wrap the question: say yes for the backends whose cache write this group wraps, and for GatedDeltaNet.
Remove when: vLLM's manager serves these backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import BACKENDS
from atom_patches.vllm.pcp_manager._config import managed_pcp

RECURRENT = "GDN_ATTN"

PATCH = Patch(
    id="vllm.pcp_manager.backend_support",
    target="vllm.v1.attention.backend:AttentionBackend.supports_pcp",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=("vllm.v1.worker.cp_utils:check_attention_cp_compatibility",),
    upstream="vllm-project/vllm#49564",
)


@PATCH.around
def accept_gathering_backends(original: Callable[..., bool]) -> Callable[..., bool]:
    """Accept the backends that this group wraps."""

    def supports_pcp(cls: Any) -> bool:
        return cls.get_name() in {*BACKENDS, RECURRENT} or original(cls)

    return supports_pcp
