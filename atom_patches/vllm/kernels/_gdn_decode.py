"""vLLM's own GatedDeltaNet decode: its convolution in place, then its packed recurrent step.

The operator promises to leave mixed_qkv alone and knows negative slots as padding, which costs a little more;
`timed_gdn_decode` is the pair of calls that vLLM makes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.fla.ops import fused_recurrent_gated_delta_rule_packed_decode

from atom_patches.kernels.registry import Verdict, no

from . import causal_conv1d as conv
from ._gated_delta_recurrent import supports_states


def supports_gdn_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    if eps != 1e-6:
        return no(f"vLLM's kernel normalises with an eps of 1e-6, not {eps}")
    if any(tensor.stride(-1) != 1 for tensor in (a, b, A_log, dt_bias)):
        return no("vLLM's kernel wants its gates contiguous in their last dimension")
    verdict = conv.supports_causal_conv1d_update(mixed_qkv, conv_weight, conv_bias, conv_state)
    return verdict if not verdict.ok else supports_states(mixed_qkv, ssm_state, slots, null_slot)


def gdn_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    slots, null = conv.one_padding_slot(slots, null_slot)
    return timed_gdn_decode(
        mixed_qkv.clone(), a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, A_log, dt_bias, scale, eps,
        activation, null,
    )  # fmt: skip


def timed_gdn_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    convolved = conv.timed_causal_conv1d_update(
        mixed_qkv, conv_weight, conv_bias, conv_state, slots, activation, null_slot
    )  # fmt: skip
    out = torch.empty((a.shape[0], 1, *ssm_state.shape[1:3]), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=convolved,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=ssm_state,
        out=out,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    return out[:, 0]


__all__ = ["gdn_decode", "supports_gdn_decode", "timed_gdn_decode"]
