"""A token's cache slot is the one it has without prefill context parallelism.

Why:         vLLM interleaves tokens over context-parallel ranks, and a rank writes padding for the others' tokens.
How:         let each block table count one prefill-context-parallel rank.
Remove when: vLLM replicates the KV cache over prefill-context-parallel ranks (it does from 0.26).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.v1.worker.block_table import BlockTable

PATCH = Patch(
    id="vllm.pcp.block_table",
    target="vllm.v1.worker.block_table:BlockTable.__init__",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=("vllm.v1.worker.block_table:BlockTable.compute_slot_mapping",),
    upstream="vllm-project/vllm#46358",
)


@PATCH.around
def count_one_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Build the block table as the only prefill-context-parallel rank would."""

    def __init__(self: BlockTable, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.pcp_world_size = 1
        self.pcp_rank = 0

    return __init__
