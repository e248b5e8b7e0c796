"""Weights in FP8 with scales of blocks: plain torch for the kernels, on the weights in float32.

The layers, their parameters and the loading are SGLang's. Inputs are not rounded, so that an oracle with such weights
says what the answers are, and so the model's dtype may be float32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_on_cpu.after_import import replace

FP8 = "sglang.srt.layers.quantization.fp8"


def _whole(weight: Any, scale: Any, block: list[int]) -> Any:
    whole = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * whole[..., : weight.shape[-2], : weight.shape[-1]]


def _product(**given: Any) -> Any:
    from torch.nn.functional import linear

    return linear(
        given["input"], _whole(given["weight"], given["weight_scale"], given["block_size"]), given.get("bias")
    )


def _experts(original: Any) -> Any:
    def apply(method: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        block = method.weight_block_size
        plain = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=_whole(layer.w13_weight, layer.w13_weight_scale_inv, block),
            w2_weight=_whole(layer.w2_weight, layer.w2_weight_scale_inv, block),
        )
        output = fused_moe_native.moe_forward_native(
            plain, dispatch_output.hidden_states, dispatch_output.topk_output, method.moe_runner_config
        )
        return StandardCombineInput(hidden_states=output)

    return apply


def _no_runner(original: Any) -> Any:
    def create_moe_runner(method: Any, layer: Any, config: Any) -> None:
        method.moe_runner_config = config

    return create_moe_runner


def _float32_too(original: Any) -> Any:
    def get_supported_act_dtypes(cls: Any) -> Any:
        import torch

        return [*original(), torch.float32]

    return classmethod(get_supported_act_dtypes)


def install() -> None:
    replace(FP8, "dispatch_w8a8_block_fp8_linear", lambda original: lambda **shape: _product)
    replace(FP8, "Fp8LinearMethod.process_weights_after_loading", lambda original: lambda method, layer: None)
    replace(FP8, "Fp8MoEMethod.process_weights_after_loading", lambda original: lambda method, layer: None)
    replace(FP8, "Fp8MoEMethod.create_moe_runner", _no_runner)
    replace(FP8, "Fp8MoEMethod.apply", _experts)
    replace(FP8, "Fp8Config.get_supported_act_dtypes", _float32_too)
