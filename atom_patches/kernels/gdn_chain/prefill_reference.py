"""`gdn_prefill` in plain torch: the references of its parts, one after the other, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.causal_conv1d.reference import causal_conv1d
from atom_patches.kernels.gated_delta_rule.chunk_reference import (
    CHUNK_SIZE,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_segment,
)
from atom_patches.kernels.gdn_gating.reference import gdn_gating
from atom_patches.kernels.l2norm.reference import l2norm
from atom_patches.kernels.slots import is_real

__all__ = ["gdn_prefill", "gdn_prefill_segment"]


def gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    """See the package; cu_seqlens is read on the host."""
    value_heads, value_size, key_size = ssm_state.shape[1:]
    keys = (mixed_qkv.shape[1] - value_heads * value_size) // 2
    wide = causal_conv1d(
        mixed_qkv.float(), conv_weight, conv_bias, cu_seqlens, conv_state, slots, has_initial_state, activation,
        null_slot,
    )  # fmt: skip
    q, k, v = _heads(wide, keys // key_size, key_size, value_heads, eps)
    g, beta = gdn_gating(a, b, A_log, dt_bias)

    real = is_real(slots, null_slot)
    resumed = torch.zeros_like(real) if has_initial_state is None else real & has_initial_state.to(torch.bool)
    start = torch.zeros(len(slots), value_heads, value_size, key_size, device=mixed_qkv.device)
    start[resumed] = ssm_state[slots[resumed].long()].float()
    output, end = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens, start, scale, CHUNK_SIZE)
    written = real & (cu_seqlens.diff() > 0)
    ssm_state[slots[written].long()] = end[written].to(ssm_state.dtype)
    return _without_padding(output, cu_seqlens, real).to(mixed_qkv.dtype)


def gdn_prefill_segment(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_size: int,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> tuple[Tensor, Tensor]:
    """See the package; cu_seqlens is read on the host."""
    wide = causal_conv1d(
        mixed_qkv.float(), conv_weight, conv_bias, cu_seqlens, conv_state.clone(), slots, has_initial_state, activation,
        null_slot,
    )  # fmt: skip
    _, k, v = _heads(wide, key_heads, key_size, a.shape[1], eps)
    g, beta = gdn_gating(a, b, A_log, dt_bias)
    ends, maps = chunk_gated_delta_rule_segment(k, v, g, beta, cu_seqlens)
    real = is_real(slots, null_slot)[:, None, None, None]
    return torch.where(real, ends, 0.0), torch.where(real, maps, torch.eye(key_size, device=maps.device))


def _heads(wide: Tensor, key_heads: int, key_size: int, value_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """[T, 2 HK K + HV V] -> q, k [T, HK, K] of unit length, v [T, HV, V]."""
    keys = key_heads * key_size
    q, k, v = wide.split([keys, keys, wide.shape[1] - 2 * keys], dim=1)
    q, k = (l2norm(part.unflatten(1, (key_heads, key_size)), eps) for part in (q, k))
    return q, k, v.unflatten(1, (value_heads, -1))


def _without_padding(output: Tensor, cu_seqlens: Tensor, real: Tensor) -> Tensor:
    """The rows of padding sequences become 0."""
    row = torch.arange(output.shape[0], device=output.device)
    owner = torch.searchsorted(cu_seqlens[1:].contiguous().long(), row, right=True)
    kept = torch.cat([real, real.new_zeros(1)])[owner]
    return output * kept[:, None, None]
