"""A layer's routed experts: SGLang's weights and dispatch, and its kernels or this package's."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import RoutingMethodType, get_moe_a2a_backend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import cpu_has_amx_support, is_cpu
from torch import Tensor, nn

from atom_patches.core import settings
from atom_patches.kernels.fused_moe import fused_moe, moe_routing
from atom_patches.models.parts import ExpertsShape
from atom_patches.sglang.adapters.current import current_batch
from atom_patches.sglang.adapters.server_args import resolved

if TYPE_CHECKING:
    from atom_patches.models.mlp import GatedMlp

SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}
"""What SGLang calls an expert's three matrices; the first two are one parameter, w13."""


class RoutedExperts(nn.Module):
    """The sum over each row's chosen experts: of those that this rank holds, where the exchange adds the ranks'.

    Where SGLang would run its own Triton kernels, this package's run instead, and take the shared expert along.
    """

    def __init__(
        self, layer: int, shape: ExpertsShape, *, quant_config: Any, prefix: str, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self._bias = [bias]  # the router's parameter, not one of this module
        choice: dict[str, Any] = {}
        if bias is not None:
            choice |= {"use_grouped_topk": True, "num_expert_group": shape.groups, "topk_group": shape.chosen_groups}
            choice |= {"scoring_func": "sigmoid", "correction_bias": bias}
        self.topk = TopK(top_k=shape.chosen, renormalize=shape.renormalise, layer_id=layer, **choice)
        routing = RoutingMethodType.RenormalizeNaive if shape.renormalise else RoutingMethodType.Default
        if bias is not None:
            routing = RoutingMethodType.DeepSeekV3
        self.experts = get_moe_impl_class(quant_config)(
            layer_id=layer,
            top_k=shape.chosen,
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            quant_config=quant_config,
            prefix=prefix,
            routing_method_type=routing,
            inplace=False,  # the shared expert reads the same rows
        )
        if hasattr(self.topk, "bind_runner_backend"):  # else the choice asks for the runner by itself
            self.topk.bind_runner_backend(
                self.experts.runner_backend, routing_method_type=self.experts.routing_method_type
            )
        self.own = "experts" in settings.fusions() and _as_stored(self.experts)
        # Not modules of this one: the decoder's layer has them.
        self._shared: tuple[GatedMlp, nn.Linear] | None = None
        self.expert_map: Tensor | None
        self.register_buffer("expert_map", _expert_map(self.experts, shape.experts) if self.own else None, False)

    def take_along(self, shared: GatedMlp, gate: nn.Linear) -> bool:
        """Whether results contain the shared expert's."""
        plain = all(_unquantised(layer) for layer in (shared.gate_up_proj, shared.down_proj))
        if self.own and plain:
            width: int = shared.down_proj.get_parameter("weight").shape[1]
            if width % self.experts.intermediate_size_per_partition == 0:
                self._shared = (shared, gate)
        return self._shared is not None

    def forward(self, hidden: Tensor, router_logits: Tensor) -> Tensor:
        if self.own:
            return self._run(hidden, router_logits)
        if get_moe_a2a_backend().is_none():
            return self.experts(hidden, self.topk(hidden, router_logits))
        # Rows are sent away: those that pad the batch, and an idle rank's, are sent nowhere.
        requests = current_batch().num_token_non_padded
        return self.experts(hidden, self.topk(hidden, router_logits, num_token_non_padded=requests))

    def _run(self, hidden: Tensor, router_logits: Tensor) -> Tensor:
        shape, [bias] = self.shape, self._bias
        weights, ids = moe_routing(
            router_logits, shape.chosen, scoring="softmax" if bias is None else "sigmoid",
            renormalize=shape.renormalise, bias=bias, n_group=shape.groups, topk_group=shape.chosen_groups,
        )  # fmt: skip
        shared: dict[str, Tensor] = {}
        if self._shared is not None:
            mlp, gate = self._shared
            shared["shared_w13"] = mlp.gate_up_proj.get_parameter("weight")
            shared["shared_w2"] = mlp.down_proj.get_parameter("weight")
            shared["shared_gate"] = gate.weight.view(-1)
        w13, w2 = self.experts.get_parameter("w13_weight"), self.experts.get_parameter("w2_weight")
        return fused_moe(hidden, w13, w2, weights, ids, expert_map=self.expert_map, **shared)

    def load(self, parameter: str, tensor: Tensor, shard: str, expert: int) -> str:
        """Load one matrix of one expert, if this rank holds it; the parameter's name within this module."""
        name = f"{'w2' if shard == 'down' else 'w13'}_{parameter}"
        target = getattr(self.experts, name)
        target.weight_loader(target, tensor, f"experts.{name}", shard_id=SHARDS[shard], expert_id=expert)
        return f"experts.{name}"


def _unquantised(layer: Any) -> bool:
    return isinstance(layer.quant_method, UnquantizedLinearMethod)


def _as_stored(experts: Any) -> bool:
    """Whether SGLang leaves weights as this package's kernels want them, and does nothing else with the routing."""
    method, args = experts.quant_method, resolved(get_server_args())
    return (
        get_moe_a2a_backend().is_none()
        and type(method) is UnquantizedFusedMoEMethod
        and method.runner.runner_backend.is_triton()
        and method._aiter_runner is None
        and not (is_cpu() and cpu_has_amx_support())
        and not _interleaves()
        and not args.enable_return_routed_experts
        and args.expert_distribution_recorder_mode is None
    )


def _interleaves() -> bool:
    """Whether SGLang may lay gates and ups out by turns once they are loaded, which it has a setting for."""
    setting = getattr(envs, "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", None)
    return setting is not None and bool(setting.get())


def _expert_map(experts: Any, count: int) -> Tensor | None:
    """From an expert's number to its place on this rank, -1 for others'; None where all are here."""
    here = experts.num_local_experts
    if here == count:
        return None
    places = torch.full((count,), -1, dtype=torch.int32)
    first = experts.moe_ep_rank * here
    places[first : first + here] = torch.arange(here, dtype=torch.int32)
    return places
