"""A layer's routed experts: SGLang's routing, dispatch, kernels and combination."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import RoutingMethodType, get_moe_a2a_backend
from torch import Tensor, nn

from atom_patches.models.parts import ExpertsShape
from atom_patches.sglang.adapters.current import current_batch

SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}
"""What SGLang calls an expert's three matrices; the first two are one parameter, w13."""


class RoutedExperts(nn.Module):
    """The sum over each row's chosen experts: of those that this rank holds, where the exchange adds the ranks'."""

    def __init__(self, layer: int, shape: ExpertsShape, *, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.topk = TopK(top_k=shape.chosen, renormalize=shape.renormalise, layer_id=layer)
        self.experts = get_moe_impl_class(quant_config)(
            layer_id=layer,
            top_k=shape.chosen,
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            quant_config=quant_config,
            prefix=prefix,
            routing_method_type=RoutingMethodType.RenormalizeNaive,
            inplace=False,  # the shared expert reads the same rows
        )

    def forward(self, hidden: Tensor, router_logits: Tensor) -> Tensor:
        if get_moe_a2a_backend().is_none():
            return self.experts(hidden, self.topk(hidden, router_logits))
        # Rows are sent away: those that pad the batch, and an idle rank's, are sent nowhere.
        requests = current_batch().num_token_non_padded
        return self.experts(hidden, self.topk(hidden, router_logits, num_token_non_padded=requests))

    def load(self, parameter: str, tensor: Tensor, shard: str, expert: int) -> None:
        """Load one matrix of one expert, if this rank holds it."""
        name = f"{'w2' if shard == 'down' else 'w13'}_{parameter}"
        target = getattr(self.experts, name)
        target.weight_loader(target, tensor, f"experts.{name}", shard_id=SHARDS[shard], expert_id=expert)
