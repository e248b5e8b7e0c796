"""SGLang's own sequence of kernels inside a GatedDeltaNet layer, as its Triton backend runs it.

Prefill: convolution, split, gates, and the chunked rule with its own normalisation of queries and keys, over the pool
of states; it waits for the device, to know the lengths and which states to clear. Decode: convolution in place, then
one kernel for all the rest.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkv_split_gdn_prefill
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

from . import causal_conv1d as conv
from ._slots import padded_rows, without_empty, without_null
from .gated_delta_rule import supports_rule

LARGEST_SPLIT = 8192
"""Columns up to which SGLang splits queries, keys and values in one kernel."""

EPS = 1e-6
"""What SGLang's kernels add below the root of the l2 norm."""


def supports_gdn_prefill(
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
) -> Verdict:
    found = conv.supports_prefill(mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, has_initial_state)
    if found.ok and scale != ssm_state.shape[3] ** -0.5:
        found = no("SGLang's prefill has one scale, K ** -0.5")
    if found.ok:
        found = supports_rule(mixed_qkv.shape[0], ssm_state.shape[3], mixed_qkv)
    return _supports(a, b, ssm_state, A_log, dt_bias, eps) if found.ok else found


def gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    cu_seqlens, slots, has_initial_state = without_empty(cu_seqlens, without_null(slots, null_slot), has_initial_state)
    if not slots.shape[0]:
        return mixed_qkv.new_zeros(mixed_qkv.shape[0], *ssm_state.shape[1:3])
    fresh = ((slots >= 0) & ~has_initial_state).nonzero()[:, 0]
    ssm_state[slots[fresh].long()] = 0.0
    y = timed_gdn_prefill(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, has_initial_state, cu_seqlens, A_log,
        dt_bias, scale, eps, activation, None,
    )  # fmt: skip
    return y.masked_fill(padded_rows(cu_seqlens, slots, y.shape[0])[:, None, None], 0.0)


def timed_gdn_prefill(
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
    """What SGLang itself runs: a slot is cleared when it is given away, padding is marked when the batch is made."""
    mixed = conv.timed_causal_conv1d(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots, has_initial_state, activation, None
    )
    heads, value_size, key_size = ssm_state.shape[1:]
    values = heads * value_size
    keys = (mixed.shape[1] - values) // 2
    if mixed.shape[1] <= LARGEST_SPLIT:
        key_heads = keys // key_size
        q, k, v = fused_qkv_split_gdn_prefill(mixed, key_heads, key_heads, heads, key_size, key_size, value_size)
    else:
        q, k, v = mixed.split([keys, keys, values], dim=1)
        q, k, v = (
            part.unflatten(1, (-1, size))[None] for part, size in ((q, key_size), (k, key_size), (v, value_size))
        )
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    o, *_ = chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=ssm_state,
        initial_state_indices=slots,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    return o[0]


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
    if b.element_size() < mixed_qkv.element_size():
        return no(f"SGLang's kernel rounds the write strength to {b.dtype}, the dtype of b")
    found = conv.supports_causal_conv1d_update(mixed_qkv, conv_weight, conv_bias, conv_state)
    return _supports(a, b, ssm_state, A_log, dt_bias, eps) if found.ok else found


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
    return timed_gdn_decode(
        mixed_qkv.contiguous().clone(), a, b, conv_weight, conv_bias, conv_state, ssm_state,
        without_null(slots, null_slot), A_log, dt_bias, scale, eps, activation, None,
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
    """What SGLang itself runs: the convolution overwrites the projection, padding is marked beforehand."""
    mixed = conv.timed_causal_conv1d_update(mixed_qkv, conv_weight, conv_bias, conv_state, slots, activation, None)
    heads, value_size = ssm_state.shape[1:3]
    out = mixed.new_empty(mixed.shape[0], 1, heads, value_size)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed,
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


def _supports(a: Tensor, b: Tensor, state: Tensor, A_log: Tensor, dt_bias: Tensor, eps: float) -> Verdict:
    if eps != EPS:
        return no(f"SGLang's kernels normalise with {EPS:g}, not {eps:g}")
    if not state.is_contiguous():
        return no("SGLang's kernels write to a contiguous pool of states only")
    if a.stride(1) != 1 or b.stride(1) != 1 or not (A_log.is_contiguous() and dt_bias.is_contiguous()):
        return no("SGLang's kernels read contiguous rows only")
    return YES
