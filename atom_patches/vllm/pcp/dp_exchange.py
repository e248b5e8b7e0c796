"""Rows meet over data-parallel engines next to the experts.

Why:         vLLM's plain experts take rows that were gathered from all engines, which `dp_naive` has left out of the
             exchange around them.
How:         wrap the call of the experts: gather the engines' rows before, and scatter the sums afterwards. Shared
             experts, which the same call runs, keep to the rows that they were given.
Remove when: vLLM exchanges rows over engines inside of the exchange over prefill-context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_data_parallel_spread_experts

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

PATCH = Patch(
    id="vllm.pcp.dp_exchange",
    target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._apply_quant_method",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_data_parallel_spread_experts,
    relies_on=("vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_impl",),
    upstream="none: vLLM does not combine data and prefill context parallelism of experts",
    changes_graph=True,
)


@PATCH.around
def exchange_around_experts(
    original: Callable[..., tuple[torch.Tensor | None, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor]]:
    """Run the experts on the rows of all engines."""
    from atom_patches.vllm.adapters.pcp_data_parallel import gather_from_engines, scatter_to_engines

    def _apply_quant_method(
        self: MoERunner,
        layer: torch.nn.Module,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        config = self.moe_config
        # Modular kernels exchange rows between engines themselves.
        here = config.pcp_size > 1 and config.dp_size > 1 and not self.quant_method.supports_internal_mk
        if here:
            hidden_states, router_logits = gather_from_engines(hidden_states, router_logits)
        shared, routed = original(self, layer, hidden_states, router_logits, shared_experts_input, input_ids)
        return shared, scatter_to_engines(routed) if here else routed

    return _apply_quant_method
