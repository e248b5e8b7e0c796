"""What the arguments of the package's operators must satisfy, whoever serves them."""

from __future__ import annotations

from torch import Tensor

ACTIVATIONS = ("silu", "swish", None)


def check_filter(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
    """Return the number of taps."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 2:
        raise ValueError(f"x must be [T, D] and weight [D, W >= 2], got {tuple(x.shape)} and {tuple(weight.shape)}")
    channels, taps = weight.shape
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"bias must be [{channels}], got {tuple(bias.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu', 'swish' or None, got {activation!r}")
    return taps


def check_pool(weight: Tensor, state: Tensor, slots: Tensor, num_seqs: int) -> None:
    channels, taps = weight.shape
    if state.dim() != 3 or state.shape[1] != channels or state.shape[2] < taps - 1:
        raise ValueError(f"state must be [S, {channels}, L >= {taps - 1}], got {tuple(state.shape)}")
    if tuple(slots.shape) != (num_seqs,):
        raise ValueError(f"slots must be [{num_seqs}], one state per sequence, got {tuple(slots.shape)}")


def check_per_sequence(name: str, tensor: Tensor | None, num_seqs: int) -> None:
    if tensor is not None and tuple(tensor.shape) != (num_seqs,):
        raise ValueError(f"{name} must be [{num_seqs}], one entry per sequence, got {tuple(tensor.shape)}")


def check_halo(weight: Tensor, halo: Tensor, num_seqs: int) -> None:
    channels, taps = weight.shape
    if tuple(halo.shape) != (num_seqs, taps - 1, channels):
        raise ValueError(f"halo must be [{num_seqs}, {taps - 1}, {channels}], got {tuple(halo.shape)}")


def count_sequences(cu_seqlens: Tensor) -> int:
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f"cu_seqlens must be [N + 1], got {tuple(cu_seqlens.shape)}")
    return cu_seqlens.shape[0] - 1
