"""Expert parallelism for CPU expert kernels that know local experts only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def local_experts(weights: Tensor, experts: Tensor, expert_map: Tensor) -> tuple[Tensor, Tensor]:
    """Translate a routing to this rank's experts.

    Args:
        weights, experts: [T, top_k] routing weights and global expert numbers.
        expert_map: [global experts] local number of each expert, negative for those of other ranks.

    Returns:
        The same shapes and dtypes with local numbers; an expert of another rank becomes expert 0 with weight 0.
    """
    local = expert_map[experts.long()]
    held = local >= 0
    return torch.where(held, weights, torch.zeros_like(weights)), local.clamp(min=0).to(experts.dtype)


def with_local_experts(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `__call__` of a CPU expert kernel that honours its argument `expert_map`.

    The kernel's own routing is asked first and then translated, by the route through which the kernel takes a
    model's custom routing function: its computation stays the original one.
    """
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    def __call__(
        self: Any,
        layer: Any,
        x: Tensor,
        use_grouped_topk: bool,
        top_k: int,
        router_logits: Tensor,
        renormalize: bool,
        topk_group: int | None = None,
        num_expert_group: int | None = None,
        global_num_experts: int = -1,
        expert_map: Tensor | None = None,
        custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: Any = MoEActivation.SILU,
    ) -> Tensor:
        routing = {
            "use_grouped_topk": use_grouped_topk,
            "topk_group": topk_group,
            "num_expert_group": num_expert_group,
            "custom_routing_function": custom_routing_function,
            "scoring_func": scoring_func,
            "routed_scaling_factor": routed_scaling_factor,
            "e_score_correction_bias": e_score_correction_bias,
        }
        common = {
            "layer": layer,
            "x": x,
            "top_k": top_k,
            "router_logits": router_logits,
            "renormalize": renormalize,
            "global_num_experts": global_num_experts,
            "apply_router_weight_on_input": apply_router_weight_on_input,
            "activation": activation,
        }
        if expert_map is None:
            return call(self, **common, **routing)

        def route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
            weights, experts = cpu_fused_moe.select_experts(
                hidden_states=hidden_states,
                router_logits=gating_output,
                top_k=topk,
                renormalize=renormalize,
                **routing,
            )
            return local_experts(weights, experts, expert_map)

        return call(self, **common, use_grouped_topk=False, custom_routing_function=route)

    return __call__
