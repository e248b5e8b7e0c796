"""Copy recurrent states between cache blocks on the CPU.

Why:         with prefix caching, states move from block to block by a Triton kernel that takes raw addresses.
How:         copy the same byte ranges with memmove.
Remove when: every release in `supports` runs GatedDeltaNet on the CPU by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_copies_states

PATCH = Patch(
    id="vllm.cpu.batch_memcpy",
    target="vllm.v1.worker.mamba_utils:batch_memcpy",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_copies_states,
    relies_on=(
        "vllm.v1.worker.mamba_utils:collect_mamba_copy_meta",
        "vllm.v1.worker.mamba_utils:do_mamba_copy_block",
    ),
    upstream="vllm-project/vllm#41025",
)


@PATCH.around
def _batch_memcpy(original: Callable[..., None]) -> Callable[..., None]:
    from atom_patches.vllm.adapters.host_memory import copy_ranges

    def batch_memcpy(src_ptrs: Any, dst_ptrs: Any, sizes: Any) -> None:
        copy_ranges(src_ptrs, dst_ptrs, sizes)

    return batch_memcpy
