"""Experts see each row of a replicated step once, and all ranks choose the same experts for it.

Why:         vLLM gathers rows over prefill-context-parallel ranks before the experts. In a step that every rank
             runs whole, each row would be gathered, and computed, once a rank.
How:         in such a step, take the first rank's router logits instead; `moe_combine` then adds up what each rank's
             experts give. In a split step the decode rows, which all ranks hold too, are gathered with the others and
             computed once a rank, by the first rank's logits: every rank sends equal rows, and gets back its own.
Remove when: vLLM skips the gather for rows that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_spread_experts

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

PATCH = Patch(
    id="vllm.pcp.moe_dispatch",
    target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_dispatch",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_spread_experts,
    relies_on=(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_impl",
        "vllm.forward_context:ForwardContext",
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast",
    ),
    upstream="none: vLLM gathers in every step",
)


@PATCH.around
def gather_split_rows_only(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Gather rows for the experts, or agree on the experts of rows that every rank holds."""
    from atom_patches.core import settings
    from atom_patches.vllm.adapters.pcp_graphs import current_copies, rows_are_whole
    from atom_patches.vllm.adapters.pcp_routing import agree_on_copies, agreed_logits
    from atom_patches.vllm.adapters.pcp_step import current_split_step, logger

    def _maybe_dispatch(
        self: MoERunner, layer: torch.nn.Module, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.moe_config.pcp_size > 1 and rows_are_whole():
            return hidden_states, agreed_logits(router_logits)
        gathered, logits = original(self, layer, hidden_states, router_logits)
        copies = current_copies()
        if copies is not None:
            agree_on_copies(logits, self.moe_config.pcp_size, copies)
        step = current_split_step()
        if step is not None and settings.pcp_debug():
            logger.info("%s: rank %d gathers %d rows for the experts", self.layer_name, step.rank, gathered.shape[0])
        return gathered, logits

    return _maybe_dispatch
