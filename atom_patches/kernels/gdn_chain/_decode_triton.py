"""`gdn_decode` and `gdn_verify` in Triton: the convolution, then everything else in one pass over strips of the states.

The states' bytes decide the time. One kernel for all was slower at every size: queries and keys of a head must not be
shifted in the convolution's state before each of its strips has read them, so one program had to take all the strips.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
from torch import Tensor

from atom_patches.kernels.causal_conv1d.triton_impl import convolve_draft, convolve_step
from atom_patches.kernels.gated_delta_rule._recurrent_triton import draft_kernel, step_config, step_kernel, supports
from atom_patches.kernels.launch import starts_early
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
    strip, warps, early = config(ssm_state)
    wide = torch.empty((rows, channels), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    convolve_step(mixed_qkv, conv_weight, conv_bias, conv_state, slots, activation, null_slot, wide, early=early)
    q, k, v = wide, wide[:, key_heads * keys :], wide[:, 2 * key_heads * keys :]
    step_kernel[(rows * heads * triton.cdiv(values, strip),)](
        q, k, v, a, b, A_log, dt_bias, output, ssm_state, slots, scale, eps, -1 if null_slot is None else null_slot,
        channels, keys, 1, channels, keys, 1, channels, values, 1, *a.stride(), *b.stride(),
        *ssm_state.stride()[:2], slots.stride(0), A_log.stride(0), dt_bias.stride(0),
        STATE_V=ssm_state.stride(2), STATE_K=ssm_state.stride(3), HEADS=heads, GROUP=heads // key_heads, V=values,
        K=keys, BV=strip, BK=triton.next_power_of_2(keys), RAW=True, EARLY=early, num_warps=warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return output


def config(state: Tensor) -> tuple[int, int, bool]:
    """(values, warps) of a program, and whether it may be launched while the convolution still runs."""
    return *step_config(state), starts_early()


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
    wide = torch.empty((rows, channels), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    convolve_draft(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots[:, 0], num_accepted, activation, null_slot,
        wide,
    )  # fmt: skip
    q, k, v = wide, wide[:, key_heads * keys :], wide[:, 2 * key_heads * keys :]
    strip, warps = step_config(ssm_state)
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
