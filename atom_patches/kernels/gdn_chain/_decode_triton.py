"""`gdn_decode` and `gdn_verify` in Triton, bound by reading and writing states.

Two ways to decode, chosen by the number of rows:

- jointly: a program takes one row and one key head with all the value heads that it serves, so that no other program
  reads the convolution states that it shifts;
- apart, while there are too few such programs to fill the GPU: the convolution first, then narrow strips of the states.

Drafts are verified apart.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.causal_conv1d.triton_impl import (
    convolve_draft,
    convolve_step,
    load_window,
    store_window,
)
from atom_patches.kernels.gated_delta_rule._recurrent_triton import (
    advance,
    draft_kernel,
    gates,
    step_config,
    step_kernel,
    supports,
    unit,
)
from atom_patches.kernels.launch import backend
from atom_patches.kernels.registry import Verdict

__all__ = ["gdn_decode", "gdn_verify", "supports_gdn_decode", "supports_gdn_verify"]


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
    *_: object,
) -> Verdict:
    bias = () if conv_bias is None else (conv_bias,)
    return supports(mixed_qkv, a, b, conv_weight, *bias, conv_state, A_log, dt_bias, ssm_state)


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
    *_: object,
) -> Verdict:
    return supports_gdn_decode(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, A_log, dt_bias
    )  # fmt: skip


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
    (rows, channels), (heads, values, keys) = mixed_qkv.shape, ssm_state.shape[1:]
    output = torch.empty((rows, heads, values), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    if not output.numel():
        return output
    key_heads = (channels - heads * values) // (2 * keys)
    way = config(rows, key_heads, heads, values, backend() == "cuda")
    null = -1 if null_slot is None else null_slot
    sizes = {
        "STATE_V": ssm_state.stride(2), "STATE_K": ssm_state.stride(3), "GROUP": heads // key_heads, "V": values,
        "K": keys, "BV": min(way.strip, triton.next_power_of_2(values)), "BK": triton.next_power_of_2(keys),
    }  # fmt: skip
    if way.joint:
        _joint_kernel[(rows * key_heads,)](
            mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, A_log, dt_bias, output,
            scale, eps, null,
            *mixed_qkv.stride(), *a.stride(), *b.stride(), *conv_weight.stride(),
            0 if conv_bias is None else conv_bias.stride(0), *conv_state.stride(), *ssm_state.stride()[:2],
            slots.stride(0), A_log.stride(0), dt_bias.stride(0),
            KEY_HEADS=key_heads, TAPS=conv_weight.shape[1], SILU=activation is not None,
            **sizes, num_warps=way.warps,
        )  # fmt: skip
        return output
    wide = torch.empty((rows, channels), dtype=torch.float32, device=mixed_qkv.device)
    convolve_step(
        mixed_qkv, conv_weight, conv_bias, conv_state, slots, activation, null_slot, wide, early=way.early
    )  # fmt: skip
    q, k, v = wide, wide[:, key_heads * keys :], wide[:, 2 * key_heads * keys :]
    step_kernel[(rows * heads * triton.cdiv(values, sizes["BV"]),)](
        q, k, v, a, b, A_log, dt_bias, output, ssm_state, slots, scale, eps, null,
        channels, keys, 1, channels, keys, 1, channels, values, 1, *a.stride(), *b.stride(),
        *ssm_state.stride()[:2], slots.stride(0), A_log.stride(0), dt_bias.stride(0),
        HEADS=heads, RAW=True, EARLY=way.early, **sizes, num_warps=way.warps,
        **({"launch_pdl": True} if way.early else {}),
    )  # fmt: skip
    return output


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
    (rows, channels), (heads, values, keys), seqs = mixed_qkv.shape, ssm_state.shape[1:], slots.shape[0]
    output = torch.empty((rows, heads, values), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    if not output.numel():
        return output
    key_heads = (channels - heads * values) // (2 * keys)
    wide = torch.empty((rows, channels), dtype=torch.float32, device=mixed_qkv.device)
    convolve_draft(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots[:, 0], num_accepted, activation, null_slot,
        wide,
    )  # fmt: skip
    q, k, v = wide, wide[:, key_heads * keys :], wide[:, 2 * key_heads * keys :]
    strip, warps = step_config(seqs * heads, values)
    draft_kernel[((seqs + 1) * heads * triton.cdiv(values, strip),)](
        q, k, v, a, b, A_log, dt_bias, output, ssm_state, slots, cu_seqlens, num_accepted, rows, seqs, scale, eps,
        -1 if null_slot is None else null_slot,
        channels, keys, 1, channels, keys, 1, channels, values, 1, *a.stride(), *b.stride(),
        *ssm_state.stride()[:2], *slots.stride(), cu_seqlens.stride(0), num_accepted.stride(0),
        A_log.stride(0), dt_bias.stride(0), STATE_V=ssm_state.stride(2), STATE_K=ssm_state.stride(3),
        HEADS=heads, GROUP=heads // key_heads, V=values, K=keys, BV=strip, BK=triton.next_power_of_2(keys), RAW=True,
        num_warps=warps,
    )  # fmt: skip
    return output


class Way(NamedTuple):
    """How a decode step is computed.

    Attributes:
        joint: in one kernel.
        strip, warps: of a program, or of each of its turns.
        early: whether the second of two kernels begins while the first runs (NVIDIA's programmatic dependent launch).
    """

    joint: bool
    strip: int
    warps: int
    early: bool = False


def config(rows: int, key_heads: int, heads: int, values: int, nvidia: bool) -> Way:
    if rows * key_heads >= 256:
        return Way(True, 64, 8)
    return Way(False, 8 if rows * heads <= 128 else 32, 1 if rows * heads <= 128 else 4)


@triton.jit
def _joint_kernel(
    x, a, b, weight, bias, conv_state, state, slots, A_log, dt_bias, output, scale, eps, null_slot,
    x_row, x_channel, a_row, a_head, b_row, b_head, weight_channel, weight_tap, bias_channel,
    conv_slot, conv_channel, conv_time, state_slot, state_head, slots_stride, log_stride, dt_stride,
    KEY_HEADS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    STATE_V: tl.constexpr, STATE_K: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    STRIPS: tl.constexpr = (V + BV - 1) // BV
    row = (tl.program_id(0) // KEY_HEADS).to(tl.int64)
    key_head = (tl.program_id(0) % KEY_HEADS).to(tl.int64)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    y_at = output + (row * KEY_HEADS + key_head) * GROUP * V
    if (slot < 0) | (slot == null_slot):
        for turn in range(0, GROUP * STRIPS):
            value = (turn % STRIPS) * BV + tl.arange(0, BV)
            zero = tl.zeros([BV], tl.float32).to(output.dtype.element_ty)
            tl.store(y_at + (turn // STRIPS) * V + value, zero, mask=value < V)
        return

    key = tl.arange(0, BK)
    in_k = key < K
    x_at, conv_at = x + row * x_row, conv_state + slot * conv_slot
    q_channel = key_head * K + key
    k_channel = KEY_HEADS * K + q_channel
    q, q_window = load_window(
        x_at, conv_at, weight, bias, q_channel, in_k, x_channel, conv_channel, conv_time,
        weight_channel, weight_tap, bias_channel, TAPS, SILU,
    )  # fmt: skip
    k, k_window = load_window(
        x_at, conv_at, weight, bias, k_channel, in_k, x_channel, conv_channel, conv_time,
        weight_channel, weight_tap, bias_channel, TAPS, SILU,
    )  # fmt: skip
    q, k = unit(q, eps) * scale, unit(k, eps)

    for turn in range(0, GROUP * STRIPS):
        head = key_head * GROUP + turn // STRIPS
        value = (turn % STRIPS) * BV + tl.arange(0, BV)
        in_v = value < V
        both = in_v[:, None] & in_k[None, :]
        state_at = state + slot * state_slot + head * state_head + (value[:, None] * STATE_V + key[None, :] * STATE_K)
        s = tl.load(state_at, mask=both, other=0.0).to(tl.float32)
        channel = 2 * KEY_HEADS * K + head * V + value
        v, v_window = load_window(
            x_at, conv_at, weight, bias, channel, in_v, x_channel, conv_channel, conv_time,
            weight_channel, weight_tap, bias_channel, TAPS, SILU,
        )  # fmt: skip
        decay, strength = gates(
            tl.load(a + row * a_row + head * a_head).to(tl.float32),
            tl.load(b + row * b_row + head * b_head).to(tl.float32),
            tl.load(A_log + head * log_stride).to(tl.float32),
            tl.load(dt_bias + head * dt_stride).to(tl.float32),
        )
        s, read = advance(s, q, k, v, decay, strength)
        tl.store(state_at, s.to(state.dtype.element_ty), mask=both)
        tl.store(y_at + (turn // STRIPS) * V + value, read.to(output.dtype.element_ty), mask=in_v)
        # Every thread has read this turn's inputs, and in the first turn those of q and k.
        tl.debug_barrier()
        store_window(v_window, conv_at, channel, in_v, conv_channel, conv_time, TAPS)
    store_window(q_window, conv_at, q_channel, in_k, conv_channel, conv_time, TAPS)
    store_window(k_window, conv_at, k_channel, in_k, conv_channel, conv_time, TAPS)
