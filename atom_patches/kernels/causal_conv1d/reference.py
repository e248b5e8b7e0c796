"""Depthwise causal convolution in plain torch: a ragged prefill and a batched decode step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> Tensor:
    """Convolve ragged sequences, reading and writing their states.

    Args:
        x, weight, bias, state, slots: as in the package's schema; rows of x outside every sequence are
            ignored.
        cu_seqlens: [N + 1] integers, non-decreasing: sequence i owns the rows from cu_seqlens[i] up to, not
            including, cu_seqlens[i + 1]. It is read on the host.
        has_initial_state: [N] bool; where False the sequence starts from zeros and what its slot holds is
            ignored. None means False everywhere.
        activation: "silu" (also spelt "swish") or None.
        null_slot: slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        output [T, D] in x's dtype. The state of each non-empty, real sequence now holds its last W - 1
        inputs; that of an empty sequence is left as it was.

    Raises:
        ValueError: shapes that contradict the schema, or an unknown activation.
    """
    taps = _check_shapes(x, weight, bias, state, slots, cu_seqlens.numel() - 1)
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    line = _lay_out(cu_seqlens, taps - 1, x.device)
    if not line.rows.numel():
        return output
    real = _is_real(slots, null_slot)
    resumed = torch.zeros_like(real) if has_initial_state is None else real & has_initial_state.to(torch.bool)
    buffer = torch.zeros(line.size, x.shape[1], dtype=torch.float32, device=x.device)
    buffer[line.history[resumed]] = state[slots[resumed].long()].float().mT
    buffer[line.places] = x[line.rows].float()
    y = torch.zeros(line.rows.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    for tap in range(taps):
        y += weight[:, tap].float() * buffer[line.places - (taps - 1) + tap]
    y = _finish(y, bias, activation).masked_fill(~real[line.owner][:, None], 0.0)
    output[line.rows] = y.to(x.dtype)
    written = real & line.filled
    state[slots[written].long()] = buffer[line.tail[written]].mT.to(state.dtype)
    return output


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor,
    slots: Tensor,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> Tensor:
    """Convolve one new token per row (T = N) and shift it into the row's state.

    Args:
        x, weight, bias, state, slots: as in the package's schema; real slots must be distinct.
        activation, null_slot: as in `causal_conv1d`.

    Returns:
        output [N, D] in x's dtype.

    Raises:
        ValueError: shapes that contradict the schema, or an unknown activation.
    """
    _check_shapes(x, weight, bias, state, slots, x.shape[0])
    real = _is_real(slots, null_slot)
    slot = slots[real].long()
    window = torch.cat([state[slot].float(), x[real].float()[:, :, None]], dim=2)
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    output[real] = _finish((window * weight.float()).sum(2), bias, activation).to(x.dtype)
    state[slot] = window[:, :, 1:].to(state.dtype)
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


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, num_seqs: int) -> int:
    """Return the number of taps."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 2:
        raise ValueError(f"x must be [T, D] and weight [D, W >= 2], got {tuple(x.shape)} and {tuple(weight.shape)}")
    channels, taps = weight.shape
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"bias must be [{channels}], got {tuple(bias.shape)}")
    if state.dim() != 3 or tuple(state.shape[1:]) != (channels, taps - 1):
        raise ValueError(f"state must be [S, {channels}, {taps - 1}], got {tuple(state.shape)}")
    if tuple(slots.shape) != (num_seqs,):
        raise ValueError(f"slots must be [{num_seqs}], one state per sequence, got {tuple(slots.shape)}")
    return taps


def _is_real(slots: Tensor, null_slot: int | None) -> Tensor:
    return slots >= 0 if null_slot is None else (slots >= 0) & (slots != null_slot)


def _finish(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        y = y + bias.float()
    if activation is None:
        return y
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation must be 'silu', 'swish' or None, got {activation!r}")
    return silu(y)
