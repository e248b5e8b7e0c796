"""Experts that every prefill-context-parallel rank holds are cut over tensor-parallel ranks only.

Why:         vLLM cuts or distributes experts over prefill-context-parallel ranks too. Then each layer gathers all rows
             and scatters the sums, rows are exchanged that need not be, and some widths cannot be cut so.
How:         let the experts' layout count one prefill-context-parallel rank. A layer then allocates and loads whole
             experts, which the memory profile sees, and runs the rows at hand without a collective of its own.
Remove when: vLLM has an option for experts that every prefill-context-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.adapters.pcp_experts import whole_rule
from atom_patches.vllm.pcp._config import pcp_with_replicated_experts

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

PATCH = Patch(
    id="vllm.pcp.moe_parallel",
    target="vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig.make",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_replicated_experts,
    relies_on=(
        "vllm.model_executor.layers.fused_moe.layer:FusedMoE.__init__",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_dispatch",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_combine",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_reduce_final_output",
    ),
    upstream="none: vLLM spreads experts over all ranks of an engine",
    changes_graph=True,
)


def details() -> Iterator[str]:
    """What `explain` adds: where `ATOM_PCP_MOE=auto` leaves experts whole."""
    return whole_rule()


@PATCH.around
def leave_out_context_ranks(original: Callable[..., FusedMoEParallelConfig]) -> Callable[..., FusedMoEParallelConfig]:
    """Lay experts out over the tensor-parallel ranks."""

    def make(
        tp_size_: int, pcp_size_: int, dp_size_: int, sp_size_: int, vllm_parallel_config: ParallelConfig
    ) -> FusedMoEParallelConfig:
        return original(tp_size_, 1, dp_size_, sp_size_, vllm_parallel_config)

    return make
