"""`gdn_decode` in plain torch: the references of its parts, one after the other, in float32."""

from __future__ import annotations

from torch import Tensor

from atom_patches.kernels.causal_conv1d.reference import causal_conv1d_update
from atom_patches.kernels.gated_delta_rule.recurrent_reference import recurrent_gated_delta_rule
from atom_patches.kernels.gdn_gating.reference import gdn_gating
from atom_patches.kernels.l2norm.reference import l2norm

__all__ = ["gdn_decode"]


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
    value_heads, value_size, key_size = ssm_state.shape[1:]
    keys = (mixed_qkv.shape[1] - value_heads * value_size) // 2
    wide = causal_conv1d_update(
        mixed_qkv.float(), conv_weight, conv_bias, conv_state, slots, activation, null_slot
    )  # fmt: skip
    q, k, v = wide.split([keys, keys, value_heads * value_size], dim=1)
    q, k = (l2norm(part.unflatten(1, (-1, key_size)), eps) for part in (q, k))
    v = v.unflatten(1, (value_heads, value_size))
    g, beta = gdn_gating(a, b, A_log, dt_bias)
    output = recurrent_gated_delta_rule(q, k, v, g, beta, ssm_state, slots, scale, null_slot)
    return output.to(mixed_qkv.dtype)
