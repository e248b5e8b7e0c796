"""Attention backends that read what was gathered are accepted under prefill context parallelism.

Why:         vLLM asks every attention implementation whether it supports prefill context parallelism itself,
             and none does. With gathered keys and values the implementation has nothing to support.
How:         wrap the check: accept the backends whose cache write this group wraps, refuse the others by name.
Remove when: vLLM serves prefill context parallelism for the architectures in `_config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled, without_pcp

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PATCH = Patch(
    id="vllm.pcp.attention_support",
    target="vllm.v1.worker.cp_utils:check_attention_cp_compatibility",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def accept_gathering_backends(original: Callable[[VllmConfig], None]) -> Callable[[VllmConfig], None]:
    """Check the layers of an engine under prefill context parallelism by our own rules."""
    from atom_patches.vllm.adapters.pcp_support import check_layers, tell_unproven

    def check_attention_cp_compatibility(vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            check_layers(vllm_config)
            tell_unproven(vllm_config)
            vllm_config = without_pcp(vllm_config)
        original(vllm_config)

    return check_attention_cp_compatibility
