"""The recurrent operators of the gated delta rule in Triton.

A program takes one sequence (or row), one value head and some of its values: a strip [values, K] of the state, which is
read once, held in registers and written once per token. Everything else is small beside it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import power_of_two

from .recurrent_reference import check_draft, check_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_KEY = 512


def supports_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *_: object
) -> Verdict:
    return supports(q, k, v, g, beta, state)


def supports_verify_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state: Tensor, *_: object
) -> Verdict:
    return supports(q, k, v, g, beta, state)


def supports(*tensors: Tensor) -> Verdict:
    """Whether these kernels can serve; the state is the last of the tensors."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return no(f"Triton serves float32, bfloat16 and float16, not {tensor.dtype}")
    state = tensors[-1]
    if state.shape[-1] > LARGEST_KEY:
        return no(f"keys of {state.shape[-1]} values do not fit into registers; at most {LARGEST_KEY}")
    if state.shape[2] * state.stride(2) + state.shape[3] * state.stride(3) >= 2**31:
        return no("the values of one head's state lie more than 2^31 elements apart")
    return YES


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    scale: float,
    null_slot: int | None,
) -> Tensor:
    group = check_step(q, k, v, g, beta, state, slots)
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not output.numel():
        return output
    rows, heads, values, keys = *v.shape, k.shape[2]
    strip, warps = step_config(state)
    step_kernel[(rows * heads * triton.cdiv(values, strip),)](
        q, k, v, g, beta, None, None, output, state, slots, scale, 0.0, -1 if null_slot is None else null_slot,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(), *state.stride()[:2], slots.stride(0),
        0, 0, STATE_V=state.stride(2), STATE_K=state.stride(3), RAW=False, EARLY=False,
        HEADS=heads, GROUP=group, V=values, K=keys, BV=strip, BK=power_of_two(keys), num_warps=warps,
    )  # fmt: skip
    return output


def verify_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    scale: float,
    null_slot: int | None,
) -> Tensor:
    group = check_draft(q, k, v, g, beta, cu_seqlens, state, slots, num_accepted)
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not output.numel():
        return output
    rows, heads, values, keys, seqs = *v.shape, k.shape[2], slots.shape[0]
    strip, warps = step_config(state)
    # One sequence more than there are: it clears the rows outside all of them.
    draft_kernel[((seqs + 1) * heads * triton.cdiv(values, strip),)](
        q, k, v, g, beta, None, None, output, state, slots, cu_seqlens, num_accepted, rows, seqs, scale, 0.0,
        -1 if null_slot is None else null_slot,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(), *state.stride()[:2], *slots.stride(),
        cu_seqlens.stride(0), num_accepted.stride(0), 0, 0, STATE_V=state.stride(2), STATE_K=state.stride(3),
        HEADS=heads, GROUP=group, V=values, K=keys, BV=strip, BK=power_of_two(keys), RAW=False,
        num_warps=warps,
    )  # fmt: skip
    return output


STRIP = 4096
"""Bytes of the state that a warp holds: 128 a thread."""


def step_config(state: Tensor) -> tuple[int, int]:
    """(values, warps) of a program: a warp for float32 states; four for narrower ones, whose small strips would have
    the rows of q, k and v read too often (benchmarks/kernels-h200-2026-11-29)."""
    values, keys = state.shape[2:]
    warps = 1 if state.element_size() == 4 else 4
    strip = max(1, warps * STRIP // (power_of_two(keys) * state.element_size()))
    return min(strip, power_of_two(values)), warps


@jit
def advance(s, q, k, v, decay, beta):
    """One token: state s [V, K], q and k [K], v [V], all float32; the new state and what is read from it.

    What the token writes is read back as its product with k . q, so that both sums over the state run at once.
    """
    s = s * decay
    written = beta * (v - tl.sum(s * k[None, :], axis=1))
    read = tl.sum(s * q[None, :], axis=1) + written * tl.sum(k * q, axis=0)
    return s + written[:, None] * k[None, :], read


@jit
def gates(a, b, log, bias):
    """Decay and write strength of the projections a and b; scalars, or vectors over heads, float32.

    Only the decay is kept, in which a tiny softplus counts for nothing beside 1: the plain logarithm is enough.
    """
    x = a + bias
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.exp(-tl.exp(log) * softplus), tl.sigmoid(b)


@jit(do_not_specialize=["null_slot"])
def step_kernel(
    q, k, v, g, beta, A_log, dt_bias, output, state, slots, scale, eps, null_slot,
    q_row, q_head, q_key, k_row, k_head, k_key, v_row, v_head, v_value, g_row, g_head, beta_row, beta_head,
    state_slot, state_head, slots_stride, log_stride, bias_stride, STATE_V: tl.constexpr, STATE_K: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    RAW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token per row. RAW: q and k are not normalised yet, and g and beta are the projections that make them.
    EARLY: the kernel before this one may still be running; only weights are read before it has ended."""
    STRIPS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    row = (program // (HEADS * STRIPS)).to(tl.int64)
    head = ((program // STRIPS) % HEADS).to(tl.int64)
    value = (program % STRIPS) * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    in_v, in_k = value < V, key < K
    if RAW:
        log = tl.load(A_log + head * log_stride).to(tl.float32)
        bias = tl.load(dt_bias + head * bias_stride).to(tl.float32)
    if EARLY:
        gdc_wait()
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    y_at = output + (row * HEADS + head) * V + value
    if (slot < 0) | (slot == null_slot):
        tl.store(y_at, tl.zeros([BV], tl.float32).to(output.dtype.element_ty), mask=in_v)
        return
    both = in_v[:, None] & in_k[None, :]
    state_at = state + slot * state_slot + head * state_head + (value[:, None] * STATE_V + key[None, :] * STATE_K)
    s = tl.load(state_at, mask=both, other=0.0).to(tl.float32)
    decay = tl.load(g + row * g_row + head * g_head).to(tl.float32)
    strength = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    q_at = q + row * q_row + (head // GROUP) * q_head
    k_at = k + row * k_row + (head // GROUP) * k_head
    v_at = v + row * v_row + head * v_head
    b_q = tl.load(q_at + key * q_key, mask=in_k, other=0.0).to(tl.float32)
    b_k = tl.load(k_at + key * k_key, mask=in_k, other=0.0).to(tl.float32)
    b_v = tl.load(v_at + value * v_value, mask=in_v, other=0.0).to(tl.float32)
    if RAW:
        decay, strength = gates(decay, strength, log, bias)
        b_q, b_k = unit(b_q, eps), unit(b_k, eps)
    else:
        decay = tl.exp(decay)
    s, read = advance(s, b_q * scale, b_k, b_v, decay, strength)
    tl.store(state_at, s.to(state.dtype.element_ty), mask=both)
    tl.store(y_at, read.to(output.dtype.element_ty), mask=in_v)


@jit
def unit(x, eps):
    """x [K] scaled to unit length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@jit(do_not_specialize=["num_rows", "num_seqs", "null_slot"])
def draft_kernel(
    q, k, v, g, beta, A_log, dt_bias, output, state, slots, cu_seqlens, num_accepted, num_rows, num_seqs, scale, eps,
    null_slot,
    q_row, q_head, q_key, k_row, k_head, k_key, v_row, v_head, v_value, g_row, g_head, beta_row, beta_head,
    state_slot, state_head, slots_seq, slots_token, cu_stride, accepted_stride, log_stride, bias_stride,
    STATE_V: tl.constexpr, STATE_K: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """Up to n tokens per sequence; RAW as in `step_kernel`."""
    STRIPS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    sequence = (program // (HEADS * STRIPS)).to(tl.int64)
    head = ((program // STRIPS) % HEADS).to(tl.int64)
    value = (program % STRIPS) * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    in_v, in_k = value < V, key < K
    zero = tl.zeros([BV], tl.float32).to(output.dtype.element_ty)
    y_at = output + head * V + value
    start = tl.load(cu_seqlens + sequence * cu_stride).to(tl.int64)
    if sequence == num_seqs:
        for row in range(0, tl.load(cu_seqlens).to(tl.int64)):
            tl.store(y_at + row * HEADS * V, zero, mask=in_v)
        for row in range(start, num_rows):
            tl.store(y_at + row * HEADS * V, zero, mask=in_v)
        return
    end = tl.load(cu_seqlens + (sequence + 1) * cu_stride).to(tl.int64)
    if start >= end:
        return
    slots_at = slots + sequence * slots_seq
    accepted = tl.load(num_accepted + sequence * accepted_stride).to(tl.int64)
    slot = tl.load(slots_at + (accepted - 1) * slots_token).to(tl.int64)
    if (slot < 0) | (slot == null_slot):
        for row in range(start, end):
            tl.store(y_at + row * HEADS * V, zero, mask=in_v)
        return
    both = in_v[:, None] & in_k[None, :]
    state_at = state + head * state_head + (value[:, None] * STATE_V + key[None, :] * STATE_K)
    s = tl.load(state_at + slot * state_slot, mask=both, other=0.0).to(tl.float32)
    q_at = q + (head // GROUP) * q_head + key * q_key
    k_at = k + (head // GROUP) * k_head + key * k_key
    v_at = v + head * v_head + value * v_value
    if RAW:
        log = tl.load(A_log + head * log_stride).to(tl.float32)
        bias = tl.load(dt_bias + head * bias_stride).to(tl.float32)
    for row in range(start, end):
        b_q = tl.load(q_at + row * q_row, mask=in_k, other=0.0).to(tl.float32)
        b_k = tl.load(k_at + row * k_row, mask=in_k, other=0.0).to(tl.float32)
        b_v = tl.load(v_at + row * v_row, mask=in_v, other=0.0).to(tl.float32)
        decay = tl.load(g + row * g_row + head * g_head).to(tl.float32)
        strength = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
        if RAW:
            decay, strength = gates(decay, strength, log, bias)
            b_q, b_k = unit(b_q, eps), unit(b_k, eps)
        else:
            decay = tl.exp(decay)
        s, read = advance(s, b_q * scale, b_k, b_v, decay, strength)
        tl.store(y_at + row * HEADS * V, read.to(output.dtype.element_ty), mask=in_v)
        after = tl.load(slots_at + (row - start) * slots_token).to(tl.int64)
        real = (after >= 0) & (after != null_slot)
        tl.store(state_at + after * state_slot, s.to(state.dtype.element_ty), mask=both & real)


__all__ = [
    "recurrent_gated_delta_rule",
    "supports_recurrent_gated_delta_rule",
    "supports_verify_gated_delta_rule",
    "verify_gated_delta_rule",
]
