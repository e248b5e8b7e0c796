"""A layer's routed experts: vLLM's weights, and its kernels or this package's."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from atom_patches.core import settings
from atom_patches.kernels.fused_moe import fused_moe, moe_routing
from atom_patches.models.parts import ExpertsShape

if TYPE_CHECKING:
    from atom_patches.models.mlp import GatedMlp

SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}
"""What vLLM calls an expert's three matrices; the first two are one parameter, w13."""


class RoutedExperts(nn.Module):
    """The sum over each row's chosen experts, finished over all ranks.

    Where vLLM would run its own Triton kernels, this package's run instead, and take the shared expert along.
    """

    def __init__(
        self, shape: ExpertsShape, *, quant_config: Any, prefix: str, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self._bias = [bias]  # the router's parameter, not one of this module
        choice: dict[str, Any] = {}
        if bias is not None:
            choice |= {"use_grouped_topk": True, "num_expert_group": shape.groups, "topk_group": shape.chosen_groups}
            choice |= {"scoring_func": "sigmoid", "e_score_correction_bias": bias}
        self.experts = FusedMoE(
            num_experts=shape.experts,
            top_k=shape.chosen,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            renormalize=shape.renormalise,
            quant_config=quant_config,
            prefix=prefix,
            **choice,
        )
        self.own = "experts" in settings.fusions() and _as_stored(self.experts)
        # Not modules of this one: the decoder's layer has them.
        self._shared: tuple[GatedMlp, nn.Linear] | None = None

    def take_along(self, shared: GatedMlp, gate: nn.Linear) -> bool:
        """Whether results contain the shared expert's."""
        plain = all(_unquantised(layer) for layer in (shared.gate_up_proj, shared.down_proj))
        if self.own and plain:
            width: int = shared.down_proj.get_parameter("weight").shape[1]
            if width % self.experts.intermediate_size_per_partition == 0:
                self._shared = (shared, gate)
        return self._shared is not None

    def forward(self, hidden: Tensor, router_logits: Tensor) -> Tensor:
        if not self.own:
            return self.experts(hidden, router_logits)
        weights, ids = self._choose(router_logits)
        experts: Any = self.experts
        share = fused_moe(
            hidden, experts.w13_weight, experts.w2_weight, weights, ids,
            expert_map=experts._expert_map, **self._shared_weights(),
        )  # fmt: skip
        ranks = max(experts.tp_size, experts.ep_size)
        return share if ranks == 1 else tensor_model_parallel_all_reduce(share)

    def _choose(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        shape, [bias] = self.shape, self._bias
        return moe_routing(
            router_logits, shape.chosen, scoring="softmax" if bias is None else "sigmoid",
            renormalize=shape.renormalise, bias=bias, n_group=shape.groups, topk_group=shape.chosen_groups,
        )  # fmt: skip

    def _shared_weights(self) -> dict[str, Any]:
        if self._shared is None:
            return {}
        shared, gate = self._shared
        return {
            "shared_w13": shared.gate_up_proj.weight,
            "shared_w2": shared.down_proj.weight,
            "shared_gate": gate.weight.view(-1),
        }

    def load(self, parameter: str, tensor: Tensor, shard: str, expert: int) -> str:
        """Load one matrix of one expert, if this rank holds it; the parameter's name within this module."""
        name = f"experts.{'w2' if shard == 'down' else 'w13'}_{parameter}"
        target = self.get_parameter(name)
        self.experts.weight_loader(target, tensor, name, SHARDS[shard], expert, return_success=False)
        return name


def _unquantised(layer: Any) -> bool:
    return isinstance(layer.quant_method, UnquantizedLinearMethod)


def _as_stored(experts: FusedMoE) -> bool:
    """Whether vLLM leaves the weights as this package's kernels want them, and each rank runs its own rows."""
    method = experts.quant_method
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.unquantized_backend is UnquantizedMoeBackend.TRITON
        and experts.moe_parallel_config.dp_size == experts.moe_parallel_config.pcp_size == 1
    )
