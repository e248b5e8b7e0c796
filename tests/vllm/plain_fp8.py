"""On the CPU, where vLLM has no kernels for weights in FP8 with scales of blocks, plain torch; a `setup` of traffic.py.

The layers, their parameters and the loading are vLLM's. What is computed is the product with the weight in float32,
so that an oracle with such weights says what the answers are: inputs are not rounded.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.functional import linear, silu

from tests.vllm import layer_probe


def _dequantised(weight: torch.Tensor, scale: torch.Tensor, block: list[int]) -> torch.Tensor:
    whole = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * whole[..., : weight.shape[-2], : weight.shape[-1]]


def _experts(method: Any, layer: Any, x: Any, router_logits: Any, input_ids: Any = None) -> Any:
    """Those of this rank, chosen as vLLM chooses on the CPU."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    topk_weights, topk_ids = select_experts(
        x, router_logits, layer.top_k, layer.use_grouped_topk, layer.renormalize, layer.topk_group,
        layer.num_expert_group, layer.custom_routing_function, layer.scoring_func, layer.routed_scaling_factor,
        layer.e_score_correction_bias,
    )  # fmt: skip
    block = method.quant_config.weight_block_size
    w13 = _dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block)
    w2 = _dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block)
    here = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
    output = torch.zeros_like(x)
    for number in range(w13.shape[0]):
        rows, choices = (here == number).nonzero(as_tuple=True)
        gate, up = linear(x[rows], w13[number]).chunk(2, dim=1)
        output.index_add_(0, rows, linear(silu(gate) * up, w2[number]) * topk_weights[rows, choices, None])
    return output


def install() -> None:
    """From now on, in this process."""
    from vllm.platforms import PlatformEnum

    kernels: Any = importlib.import_module("vllm.model_executor.kernels.linear")
    fp8: Any = importlib.import_module("vllm.model_executor.layers.quantization.fp8")

    layer_probe.install()

    class Plain(kernels.Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            return linear(A, _dequantised(B, Bs, list(self.weight_group_shape)))

    class PlainExperts:
        @staticmethod
        def is_monolithic() -> bool:
            return True

    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Plain]
    fp8.select_fp8_moe_backend = lambda **_: (None, PlainExperts)
    fp8.Fp8MoEMethod.process_weights_after_loading = lambda self, layer: None
    fp8.Fp8MoEMethod.get_fused_moe_quant_config = lambda self, layer: None
    fp8.Fp8MoEMethod.apply_monolithic = _experts
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])


report = layer_probe.report
