"""The experts' shares of a replicated step are added up over the ranks.

Why:         vLLM cuts or distributes experts over prefill-context-parallel ranks, and scatters the sum: each rank
             gets its part of the gathered rows. In a step that every rank runs whole, every rank needs all rows.
How:         all-reduce in such a step. All ranks get the same bits, which a reduce-scatter does not promise.
Remove when: vLLM does the same for rows that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_spread_experts

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

PATCH = Patch(
    id="vllm.pcp.moe_combine",
    target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_combine",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_spread_experts,
    relies_on=("vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_impl",),
    upstream="none: vLLM reduces and scatters in every step",
)


@PATCH.around
def reduce_replicated_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Combine the ranks' expert outputs."""
    from vllm.distributed import get_pcp_group

    from atom_patches.vllm.adapters.pcp_graphs import rows_are_whole

    def _maybe_combine(self: MoERunner, shared_output: torch.Tensor | None, hidden_states: torch.Tensor) -> Any:
        if self.moe_config.pcp_size == 1 or not rows_are_whole():
            return original(self, shared_output, hidden_states)
        hidden_states = get_pcp_group().all_reduce(hidden_states)
        return hidden_states if shared_output is None else (shared_output, hidden_states)

    return _maybe_combine
