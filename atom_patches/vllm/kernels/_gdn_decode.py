"""vLLM's own GatedDeltaNet decode: its convolution in place, then its packed recurrent step, or for drafts the one with
gates.

The operators promise to leave mixed_qkv alone, know negative slots as padding and clear its output, which costs a
little more; the `timed_` functions are the pairs of calls that vLLM makes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.fla.ops import (
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_sigmoid_gating_delta_rule_update,
)

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
    if b.element_size() < mixed_qkv.element_size():
        return no(f"vLLM's kernel rounds the write strength to {b.dtype}, the dtype of b")
    verdict = conv.supports_filter(mixed_qkv, conv_weight, conv_bias, conv_state)
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


def supports_gdn_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    if slots.stride(1) != 1 or cu_seqlens.stride(0) != 1 or num_accepted.stride(0) != 1:
        return no("vLLM's kernel wants contiguous slots, cu_seqlens and num_accepted")
    if scale <= 0:
        return no(f"vLLM's kernel takes positive scales, not {scale}")
    return supports_gdn_decode(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, A_log, dt_bias, scale, eps, activation,
        null_slot,
    )  # fmt: skip


def gdn_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    slots, null = conv.one_padding_slot(slots, null_slot)
    y = timed_gdn_verify(
        mixed_qkv.clone(), a, b, conv_weight, conv_bias, conv_state, ssm_state, cu_seqlens, slots, num_accepted, A_log,
        dt_bias, scale, eps, activation, null,
    )  # fmt: skip
    return conv.clear_padding(y, cu_seqlens, slots[:, 0] != null)


def timed_gdn_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    convolved = conv.timed_causal_conv1d_verify(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots[:, 0], num_accepted, activation, null_slot
    )  # fmt: skip
    heads, value_size, key_size = ssm_state.shape[1:]
    keys = (convolved.shape[1] - heads * value_size) // 2
    q, k, v = convolved.split([keys, keys, heads * value_size], dim=1)
    out, _ = fused_sigmoid_gating_delta_rule_update(
        A_log=A_log,
        a=a,
        b=b,
        dt_bias=dt_bias,
        q=q.unflatten(1, (-1, key_size))[None].contiguous(),
        k=k.unflatten(1, (-1, key_size))[None].contiguous(),
        v=v.unflatten(1, (heads, value_size))[None].contiguous(),
        scale=scale,
        initial_state=ssm_state,
        inplace_final_state=True,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=slots,
        num_accepted_tokens=num_accepted,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


__all__ = [
    "gdn_decode",
    "gdn_verify",
    "supports_gdn_decode",
    "supports_gdn_verify",
    "timed_gdn_decode",
    "timed_gdn_verify",
]
