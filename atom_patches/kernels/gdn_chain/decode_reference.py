"""`gdn_decode` and `gdn_verify` in plain torch: the references of their parts, one after the other, in float32."""

from __future__ import annotations

from torch import Tensor

from atom_patches.kernels.causal_conv1d.reference import causal_conv1d_update, causal_conv1d_verify
from atom_patches.kernels.gated_delta_rule.recurrent_reference import (
    recurrent_gated_delta_rule,
    verify_gated_delta_rule,
)
from atom_patches.kernels.gdn_gating.reference import gdn_gating
from atom_patches.kernels.l2norm.reference import l2norm

__all__ = ["gdn_decode", "gdn_verify"]


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
    """See `decode`."""
    wide = causal_conv1d_update(
        mixed_qkv.float(), conv_weight, conv_bias, conv_state, slots, activation, null_slot
    )  # fmt: skip
    rows = (*_heads(wide, ssm_state, eps), *gdn_gating(a, b, A_log, dt_bias))
    return recurrent_gated_delta_rule(*rows, ssm_state, slots, scale, null_slot).to(mixed_qkv.dtype)


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
    """See `decode`; everything that says where something lies is read on the host."""
    wide = causal_conv1d_verify(
        mixed_qkv.float(), conv_weight, conv_bias, cu_seqlens, conv_state, slots[:, 0], num_accepted, activation,
        null_slot,
    )  # fmt: skip
    rows = (*_heads(wide, ssm_state, eps), *gdn_gating(a, b, A_log, dt_bias))
    out = verify_gated_delta_rule(*rows, cu_seqlens, ssm_state, slots, num_accepted, scale, null_slot)
    return out.to(mixed_qkv.dtype)


def _heads(wide: Tensor, ssm_state: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, HK, K], both of unit length, and v [T, HV, V] of convolved rows [T, 2 HK K + HV V]."""
    value_heads, value_size, key_size = ssm_state.shape[1:]
    keys = (wide.shape[1] - value_heads * value_size) // 2
    q, k, v = wide.split([keys, keys, value_heads * value_size], dim=1)
    q, k = (l2norm(part.unflatten(1, (-1, key_size)), eps) for part in (q, k))
    return q, k, v.unflatten(1, (value_heads, value_size))
