"""Depthwise causal convolution in plain torch: a ragged prefill, a batched decode step, a verified draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from atom_patches.kernels.slots import is_real

from ._checks import check_filter, check_halo, check_per_sequence, check_pool, count_sequences


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
    """See the package; cu_seqlens is read on the host."""
    taps = check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("has_initial_state", has_initial_state, slots.numel())
    line = _lay_out(cu_seqlens, taps - 1, x.device)
    real = is_real(slots, null_slot)
    resumed = torch.zeros_like(real) if has_initial_state is None else real & has_initial_state.to(torch.bool)
    past = torch.zeros(line.history.shape[0], taps - 1, x.shape[1], dtype=torch.float32, device=x.device)
    past[resumed] = state[slots[resumed].long(), :, : taps - 1].float().mT
    y, last = _convolve(x, weight, bias, line, past, activation)
    y = y.masked_fill(~real[line.owner][:, None], 0.0)
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    output[line.rows] = y.to(x.dtype)
    written = real & line.filled
    state[slots[written].long(), :, : taps - 1] = last[written].mT.to(state.dtype)
    return output


def causal_conv1d_halo(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    halo: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See the package; cu_seqlens is read on the host."""
    taps = check_filter(x, weight, bias, activation)
    check_halo(weight, halo, count_sequences(cu_seqlens))
    line = _lay_out(cu_seqlens, taps - 1, x.device)
    y, last = _convolve(x, weight, bias, line, halo.float(), activation)
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    output[line.rows] = y.to(x.dtype)
    return output, last.to(halo.dtype)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    """See the package."""
    taps = check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, x.shape[0])
    real = is_real(slots, null_slot)
    slot = slots[real].long()
    window = torch.cat([state[slot, :, : taps - 1].float(), x[real].float()[:, :, None]], dim=2)
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    output[real] = _finish((window * weight.float()).sum(2), bias, activation).to(x.dtype)
    state[slot, :, : taps - 1] = window[:, :, 1:].to(state.dtype)
    return output


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
    """See the package; everything that says where something lies is read on the host."""
    taps = check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("num_accepted", num_accepted, slots.numel())
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    bounds, real = cu_seqlens.tolist(), is_real(slots, null_slot).tolist()
    for i, (slot, accepted) in enumerate(zip(slots.tolist(), num_accepted.tolist(), strict=True)):
        rows = slice(bounds[i], bounds[i + 1])
        length = rows.stop - rows.start
        if not real[i] or not length:
            continue
        past = state[slot, :, accepted - 1 : accepted + taps - 2].float()
        line = torch.cat([past, x[rows].float().T], dim=1)
        y = (line.unfold(1, taps, 1) * weight.float()[:, None, :]).sum(2)
        output[rows] = _finish(y.T, bias, activation).to(x.dtype)
        state[slot, :, : taps - 2 + length] = line[:, 1:].to(state.dtype)
    return output


@dataclass(frozen=True)
class _Line:
    """Every sequence as [its H past inputs, its tokens], one behind the other: a tap never asks where it is."""

    size: int
    rows: Tensor  # [T] the row of x that each token is
    owner: Tensor  # [T] its sequence
    places: Tensor  # [T] its place in the line
    history: Tensor  # [N, H] places of the past inputs
    tail: Tensor  # [N, H] places of the last inputs
    filled: Tensor  # [N] whether the sequence has tokens


def _lay_out(cu_seqlens: Tensor, history: int, device: torch.device) -> _Line:
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths, past = bounds.diff(), torch.arange(history)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rows = bounds[0] + torch.arange(len(owner))
    begin = bounds[:-1] - bounds[0] + history * torch.arange(len(lengths))
    places = torch.arange(len(owner)) + history * (owner + 1)
    parts = (rows, owner, places, begin[:, None] + past, (begin + lengths)[:, None] + past, lengths > 0)
    return _Line(len(owner) + history * len(lengths), *(part.to(device) for part in parts))


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, line: _Line, past: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """past [N, W - 1, D]; return y of the line's rows and the last W - 1 inputs [N, W - 1, D], both float32."""
    taps = weight.shape[1]
    buffer = torch.zeros(line.size, x.shape[1], dtype=torch.float32, device=x.device)
    buffer[line.history] = past
    buffer[line.places] = x[line.rows].float()
    y = torch.zeros(line.rows.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    for tap in range(taps):
        y += weight[:, tap].float() * buffer[line.places - (taps - 1) + tap]
    return _finish(y, bias, activation), buffer[line.tail]


def _finish(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        y = y + bias.float()
    return y if activation is None else silu(y)
