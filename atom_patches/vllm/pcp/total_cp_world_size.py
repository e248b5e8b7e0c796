"""Block tables are as wide as without prefill context parallelism.

Why:         vLLM divides a request's blocks by the context-parallel ranks; here every rank keeps all of them.
How:         count decode-context-parallel ranks only.
Remove when: vLLM replicates the KV cache over prefill-context-parallel ranks (it does from 0.26).
"""

from __future__ import annotations

from collections.abc import Callable

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

PATCH = Patch(
    id="vllm.pcp.total_cp_world_size",
    target="vllm.v1.worker.cp_utils:get_total_cp_world_size",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=("vllm.v1.worker.block_table:MultiGroupBlockTable.__init__",),
    upstream="vllm-project/vllm#46358",
)


@PATCH.around
def count_decode_ranks(original: Callable[[], int]) -> Callable[[], int]:
    """The ranks over which the KV cache is spread."""
    from vllm.distributed import get_pcp_group

    def get_total_cp_world_size() -> int:
        total = original()
        try:
            ranks = get_pcp_group().world_size
        except AssertionError:  # vLLM's way to say that there are no groups yet; it counts one rank then
            return total
        return total // ranks

    return get_total_cp_world_size
