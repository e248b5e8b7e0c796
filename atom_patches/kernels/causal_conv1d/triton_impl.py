"""Depthwise causal convolution in Triton.

Prefill: a program convolves a block of one sequence's rows for a block of channels, all of it in registers. The program
of a sequence's first rows also reads its state and writes the new one, so that nobody else has to wait. Decode and
verification: a program takes one sequence and a block of channels.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import power_of_two

from ._checks import check_filter, check_halo, check_per_sequence, check_pool, count_sequences

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: How many bounds of sequences a program looks through at a time to find its own.
SEARCH = 64


def _supports(*tensors: Tensor | None) -> Verdict:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            return no(f"Triton serves float32, bfloat16 and float16, not {tensor.dtype}")
    return YES


def supports_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, state: Tensor, *_: object
) -> Verdict:
    return _supports(x, weight, bias, state)


def supports_causal_conv1d_halo(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, halo: Tensor, *_: object
) -> Verdict:
    return _supports(x, weight, bias, halo)


def supports_causal_conv1d_update(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *_: object) -> Verdict:
    return _supports(x, weight, bias, state)


def supports_causal_conv1d_verify(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, state: Tensor, *_: object
) -> Verdict:
    return _supports(x, weight, bias, state)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("has_initial_state", has_initial_state, slots.shape[0])
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        resumed = None if has_initial_state is None else has_initial_state.to(torch.bool)
        _prefill(x, weight, bias, cu_seqlens, output, state, state, slots, resumed, activation, null_slot)
    return output


def causal_conv1d_halo(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    halo: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    check_filter(x, weight, bias, activation)
    check_halo(weight, halo, count_sequences(cu_seqlens))
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    last = torch.empty(halo.shape, dtype=halo.dtype, device=halo.device)
    if output.numel() or last.numel():
        _prefill(x, weight, bias, cu_seqlens, output, halo.mT, last.mT, None, None, activation, None)
    return output, last


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, x.shape[0])
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        convolve_step(x, weight, bias, state, slots, activation, null_slot, output)
    return output


def convolve_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
    output: Tensor,
    *,
    early: bool = False,
) -> None:
    """Run `causal_conv1d_update` into output [N, D], contiguous, of any floating dtype.

    With `early`, on NVIDIA only, a kernel launched behind this one with `launch_pdl` may begin while this one runs.
    """
    (rows, channels), taps = x.shape, weight.shape[1]
    block, warps = update_config(rows, channels)
    _update_kernel[(rows, triton.cdiv(channels, block))](
        x, weight, bias, output, state, slots,
        channels, -1 if null_slot is None else null_slot,
        *x.stride(), *weight.stride(), _stride(bias), *state.stride(), slots.stride(0),
        TAPS=taps, SILU=activation is not None, BLOCK_D=block, EARLY=early, num_warps=warps,
    )  # fmt: skip


def causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("num_accepted", num_accepted, slots.shape[0])
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        convolve_draft(x, weight, bias, cu_seqlens, state, slots, num_accepted, activation, null_slot, output)
    return output


def convolve_draft(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    activation: str | None,
    null_slot: int | None,
    output: Tensor,
) -> None:
    """Run `causal_conv1d_verify` into output [T, D], contiguous, of any floating dtype."""
    (rows, channels), taps, seqs = x.shape, weight.shape[1], slots.shape[0]
    block, warps = update_config(seqs, channels)
    # One program more than there are sequences: it clears the rows outside all of them.
    _verify_kernel[(seqs + 1, triton.cdiv(channels, block))](
        x, weight, bias, output, state, slots, cu_seqlens, num_accepted,
        rows, seqs, channels, -1 if null_slot is None else null_slot,
        *x.stride(), *weight.stride(), _stride(bias), *state.stride(),
        slots.stride(0), cu_seqlens.stride(0), num_accepted.stride(0),
        TAPS=taps, PLACES=power_of_two(taps), SILU=activation is not None, BLOCK_D=block, num_warps=warps,
    )  # fmt: skip


def prefill_config(rows: int, channels: int) -> tuple[int, int, int]:
    """(rows, channels, warps) of a program."""
    return 16, min(256, power_of_two(channels)), 1


def update_config(rows: int, channels: int) -> tuple[int, int]:
    """(channels, warps) of a program: small blocks while there are few rows, so that every core gets some."""
    block, warps = (64, 1) if rows <= 4 else (256, 2)
    return min(block, power_of_two(channels)), warps


def _stride(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.stride(0)


def _prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    output: Tensor,
    past: Tensor,
    last: Tensor,
    slots: Tensor | None,
    resumed: Tensor | None,
    activation: str | None,
    null_slot: int | None,
) -> None:
    """past and last [., D, W - 1]: a pool each with slots, one entry a sequence without."""
    (rows, channels), taps, seqs = x.shape, weight.shape[1], cu_seqlens.shape[0] - 1
    block_t, block_d, warps = prefill_config(rows, channels)
    block_t = max(block_t, taps - 1)  # only a sequence's first block reaches back behind its beginning
    # See _find_block: every sequence, and the rows before and behind all of them, may need one block more. Programs in
    # a row take the same rows' channels, which lie side by side in memory.
    columns = triton.cdiv(channels, block_d)
    _prefill_kernel[((rows // block_t + seqs + 2) * columns,)](
        x, weight, bias, output, past, last, slots, resumed, cu_seqlens,
        rows, seqs, channels, columns, -1 if null_slot is None else null_slot,
        *x.stride(), *weight.stride(), _stride(bias), *past.stride(), *last.stride(),
        0 if slots is None else slots.stride(0), 0 if resumed is None else resumed.stride(0), cu_seqlens.stride(0),
        POOLED=slots is not None, TAPS=taps, SILU=activation is not None, BLOCK_T=block_t, BLOCK_D=block_d,
        SEARCH=SEARCH, num_warps=warps,
    )  # fmt: skip


@jit
def _find_block(cu_seqlens, stride, num_seqs, num_rows, block, SIZE: tl.constexpr, SEARCH: tl.constexpr):
    """Of block number `block`: its sequence, that sequence's first row and the row behind its last, the block's number
    in the sequence.

    Sequence i takes the numbers from cu_seqlens[i] // SIZE + i + 1 on, which leaves each one enough of them. Number -1
    stands for the rows before the first sequence, num_seqs for those behind the last.
    """
    begun = 0
    for first in range(0, num_seqs + 1, SEARCH):
        i = first + tl.arange(0, SEARCH)
        bound = tl.load(cu_seqlens + i * stride, mask=i <= num_seqs, other=0).to(tl.int64)
        begun += tl.sum(((i <= num_seqs) & (bound // SIZE + i + 1 <= block)).to(tl.int32), axis=0)
    sequence = begun - 1
    start = tl.load(cu_seqlens + sequence * stride, mask=sequence >= 0, other=0).to(tl.int64)
    end = tl.load(cu_seqlens + (sequence + 1) * stride, mask=sequence < num_seqs, other=num_rows).to(tl.int64)
    return sequence, start, end, block - (start // SIZE + begun)


@jit
def _activated(y, SILU: tl.constexpr):
    if SILU:
        y = y * tl.sigmoid(y)
    return y


@jit(do_not_specialize=["num_rows", "num_seqs", "null_slot"])
def _prefill_kernel(
    x, weight, bias, output, past, last, slots, resumed, cu_seqlens,
    num_rows, num_seqs, channels, columns, null_slot,
    x_row, x_channel, weight_channel, weight_tap, bias_channel,
    past_slot, past_channel, past_time, last_slot, last_channel, last_time, slots_stride, resumed_stride, cu_stride,
    POOLED: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    sequence, start, end, number = _find_block(
        cu_seqlens, cu_stride, num_seqs, num_rows, tl.program_id(0) // columns, BLOCK_T, SEARCH
    )
    length = end - start
    owned = (sequence >= 0) & (sequence < num_seqs)
    begin = number * BLOCK_T
    if POOLED:
        if begin >= length:
            return
        slot = tl.load(slots + sequence * slots_stride, mask=owned, other=-1).to(tl.int64)
        owned = owned & (slot >= 0) & (slot != null_slot)
    else:
        # The halo of an empty piece is what the next piece takes.
        if (begin >= length) & ((number > 0) | (not owned)):
            return
        slot = sequence.to(tl.int64)

    channel = (tl.program_id(0) % columns * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    inside = channel < channels
    y_at = output + (start + begin) * channels + channel
    if not owned:
        for row in range(0, min(length - begin, BLOCK_T)):
            tl.store(y_at + row * channels, tl.zeros([BLOCK_D], tl.float32).to(output.dtype.element_ty), mask=inside)
        return

    goes_on = True
    if POOLED:
        goes_on = False
        if resumed is not None:
            goes_on = tl.load(resumed + sequence * resumed_stride) != 0
    x_at = x + start * x_row + channel * x_channel
    past_at = past + slot * past_slot + channel * past_channel
    # The W - 1 inputs before the block, then the block's: read once, all in flight together.
    line = ()
    for i in tl.static_range(TAPS - 1):
        when = begin + i - (TAPS - 1)
        value = tl.load(x_at + when * x_row, mask=inside & (when >= 0), other=0.0).to(tl.float32)
        before = inside & (when < 0) & goes_on
        line += (value + tl.load(past_at + i * past_time, mask=before, other=0.0).to(tl.float32),)
    for i in tl.static_range(BLOCK_T):
        line += (tl.load(x_at + (begin + i) * x_row, mask=inside & (begin + i < length), other=0.0),)
    factors = ()
    for tap in tl.static_range(TAPS):
        at = weight + channel * weight_channel + tap * weight_tap
        factors += (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    offset = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        offset += tl.load(bias + channel * bias_channel, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(BLOCK_T):
        y = offset
        for tap in tl.static_range(TAPS):
            y += factors[tap] * line[i + tap].to(tl.float32)
        y = _activated(y, SILU).to(output.dtype.element_ty)
        tl.store(y_at + i * channels, y, mask=inside & (begin + i < length))

    if number == 0:
        ending = ()
        for place in tl.static_range(TAPS - 1):
            moment = length - (TAPS - 1) + place
            newer = tl.load(x_at + moment * x_row, mask=inside & (moment >= 0), other=0.0).to(tl.float32)
            older = tl.load(past_at + (place + length) * past_time, mask=inside & (moment < 0) & goes_on, other=0.0)
            ending += ((newer + older.to(tl.float32)).to(last.dtype.element_ty),)
        # `last` may be `past`: every thread has read before any of them writes.
        tl.debug_barrier()
        for place in tl.static_range(TAPS - 1):
            tl.store(last + slot * last_slot + channel * last_channel + place * last_time, ending[place], mask=inside)


@jit(do_not_specialize=["null_slot"])
def _update_kernel(
    x, weight, bias, output, state, slots, channels, null_slot,
    x_row, x_channel, weight_channel, weight_tap, bias_channel, state_slot, state_channel, state_time, slots_stride,
    TAPS: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    inside = channel < channels
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    y_at = output + row * channels + channel
    if (slot < 0) | (slot == null_slot):
        tl.store(y_at, tl.zeros([BLOCK_D], tl.float32).to(output.dtype.element_ty), mask=inside)
        return
    state_at = state + slot * state_slot + channel * state_channel
    y = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        y += tl.load(bias + channel * bias_channel, mask=inside, other=0.0).to(tl.float32)
    window = ()
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            value = tl.load(state_at + tap * state_time, mask=inside, other=0.0)
        else:
            value = tl.load(x + row * x_row + channel * x_channel, mask=inside, other=0.0)
        factor = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=inside, other=0.0)
        y += factor.to(tl.float32) * value.to(tl.float32)
        if tap > 0:
            window += (value,)
    tl.store(y_at, _activated(y, SILU).to(output.dtype.element_ty), mask=inside)
    # Threads need not hold the same channels when they write: every one has read before any of them does.
    tl.debug_barrier()
    for place in tl.static_range(TAPS - 1):
        tl.store(state_at + place * state_time, window[place].to(state.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_rows", "num_seqs", "null_slot"])
def _verify_kernel(
    x, weight, bias, output, state, slots, cu_seqlens, num_accepted, num_rows, num_seqs, channels, null_slot,
    x_row, x_channel, weight_channel, weight_tap, bias_channel, state_slot, state_channel, state_time,
    slots_stride, cu_stride, accepted_stride,
    TAPS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    inside = channel < channels
    zero = tl.zeros([BLOCK_D], tl.float32).to(output.dtype.element_ty)
    start = tl.load(cu_seqlens + sequence * cu_stride).to(tl.int64)
    if sequence == num_seqs:
        for row in range(0, tl.load(cu_seqlens).to(tl.int64)):
            tl.store(output + row * channels + channel, zero, mask=inside)
        for row in range(start, num_rows):
            tl.store(output + row * channels + channel, zero, mask=inside)
        return
    end = tl.load(cu_seqlens + (sequence + 1) * cu_stride).to(tl.int64)
    slot = tl.load(slots + sequence * slots_stride).to(tl.int64)
    if (slot < 0) | (slot == null_slot):
        for row in range(start, end):
            tl.store(output + row * channels + channel, zero, mask=inside)
        return
    length = end - start
    if length <= 0:
        return
    state_at = state + slot * state_slot + channel[:, None] * state_channel
    accepted = tl.load(num_accepted + sequence * accepted_stride).to(tl.int64)
    place = tl.arange(0, PLACES)[None, :]
    tap = inside[:, None] & (place < TAPS)
    factor = tl.load(
        weight + channel[:, None] * weight_channel + place * weight_tap, mask=tap, other=0.0
    ).to(tl.float32)  # fmt: skip
    x_at = x + start * x_row + channel[:, None] * x_channel
    # The last W - 2 inputs before the draft, for the new state; place 0 leaves the window.
    kept = inside[:, None] & (place > 0) & (place < TAPS - 1)
    past = tl.load(state_at + (accepted - 1 + place) * state_time, mask=kept, other=0.0)
    for time in range(0, length):
        when = time - (TAPS - 1) + place
        value = tl.load(x_at + when * x_row, mask=tap & (when >= 0), other=0.0).to(tl.float32)
        value += tl.load(
            state_at + (accepted - 1 + time + place) * state_time, mask=tap & (when < 0), other=0.0
        ).to(tl.float32)  # fmt: skip
        y = tl.sum(value * factor, axis=1)
        if bias is not None:
            y += tl.load(bias + channel * bias_channel, mask=inside, other=0.0).to(tl.float32)
        at = output + (start + time) * channels + channel
        tl.store(at, _activated(y, SILU).to(output.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    tl.store(state_at + (place - 1) * state_time, past, mask=kept)
    for time in range(0, length):
        value = tl.load(x_at + time * x_row, mask=inside[:, None], other=0.0).to(state.dtype.element_ty)
        tl.store(state_at + (TAPS - 2 + time) * state_time, value, mask=inside[:, None])
