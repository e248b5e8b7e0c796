"""Depthwise causal convolution over time, with the last W - 1 inputs of each sequence kept as its state.

For one sequence, one channel, a filter of W taps and inputs x_t (x_t for t < 0: the state, or 0 without one):

    y_t = activation(bias + sum_{j<W} weight[j] * x_{t-W+1+j})

Schema, T tokens in N sequences, D channels, W >= 2 taps, S state slots:

    x            [T, D]       floating
    weight       [D, W]       floating; weight[:, W-1] multiplies the newest input
    bias         [D] or None
    activation   "silu" (also spelt "swish") or None
    cu_seqlens   [N + 1] integers, non-decreasing: sequence i owns the rows from cu_seqlens[i] up to, not including,
                 cu_seqlens[i + 1]; rows outside every sequence give 0 and are not read
    state        [S, D, L]    floating, L >= W - 1, oldest input first; updated in place
    slots        [N] integers the state of each sequence; negative entries and `null_slot` are padding, the others
                 are distinct
    output       [T, D]       in x's dtype

Any strides are admitted. The sum is taken in float32. Padding rows and sequences give 0 and touch no state.

`causal_conv1d` and `causal_conv1d_update` use the first W - 1 places of a state. `causal_conv1d_verify` needs
L >= W - 2 + the longest draft: it leaves the last W - 2 inputs before the draft in front of the drafted ones, so that
the window that ends with the c-th drafted token starts at place c - 1. The next call is told c, `num_accepted`;
behind a prefill or an update c is 1.

`causal_conv1d_halo` is the prefill of a piece of a longer sequence whose rows before the piece lie elsewhere, as on
another rank: the W - 1 rows before it come as a tensor, `halo` [N, W - 1, D], zeros where the sequence begins. It also
returns the last W - 1 inputs of each piece, in halo's dtype: what the piece behind it takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference
from ._checks import check_filter, check_halo, check_per_sequence, check_pool, count_sequences

#: Largest (relative, absolute) difference from a float64 sum, per input dtype.
TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (1e-2, 1e-2), "float16": (2e-3, 2e-3)}


def _like_rows(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rows_and_tail(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, halo: Tensor, *_: object):
    return _like_rows(x), torch.empty(halo.shape, dtype=halo.dtype, device=halo.device)


def _shape_class(x: Tensor, weight: Tensor, *_: object) -> str:
    rows = bucket(x.shape[0], (1, 16, 64, 256, 4096))
    return f"{dtype_name(x.dtype)} d{x.shape[1]} w{weight.shape[1]} rows{rows}"


CAUSAL_CONV1D = Operation(
    package=__name__,
    name="causal_conv1d",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor(a!) state, Tensor slots, "
    "Tensor? has_initial_state, str? activation, int? null_slot) -> Tensor",
    reference=reference.causal_conv1d,
    fake=_like_rows,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
CAUSAL_CONV1D_HALO = Operation(
    package=__name__,
    name="causal_conv1d_halo",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor halo, str? activation) "
    "-> (Tensor, Tensor)",
    reference=reference.causal_conv1d_halo,
    fake=_rows_and_tail,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
CAUSAL_CONV1D_UPDATE = Operation(
    package=__name__,
    name="causal_conv1d_update",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor slots, str? activation, int? null_slot) "
    "-> Tensor",
    reference=reference.causal_conv1d_update,
    fake=_like_rows,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
CAUSAL_CONV1D_VERIFY = Operation(
    package=__name__,
    name="causal_conv1d_verify",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor(a!) state, Tensor slots, "
    "Tensor num_accepted, str? activation, int? null_slot) -> Tensor",
    reference=reference.causal_conv1d_verify,
    fake=_like_rows,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (CAUSAL_CONV1D, CAUSAL_CONV1D_HALO, CAUSAL_CONV1D_UPDATE, CAUSAL_CONV1D_VERIFY)


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
        x, weight, bias, cu_seqlens, state, slots, activation: as in the package's schema.
        has_initial_state: [N] bool; where False the sequence starts from zeros and what its slot holds is
            ignored. None means False everywhere.
        null_slot: slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        output [T, D] in x's dtype. The state of each non-empty, real sequence now holds its last W - 1
        inputs; that of an empty sequence is left as it was.

    Raises:
        ValueError: shapes that contradict the schema, or an unknown activation.
    """
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("has_initial_state", has_initial_state, slots.shape[0])
    return CAUSAL_CONV1D(x, weight, bias, cu_seqlens, state, slots, has_initial_state, activation, null_slot)


def causal_conv1d_halo(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    cu_seqlens: Tensor,
    halo: Tensor,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """Convolve pieces of sequences whose W - 1 rows before each piece are given.

    Args:
        x, weight, bias, cu_seqlens, activation: as in the package's schema, a piece being a sequence.
        halo: [N, W - 1, D] the rows before each piece, oldest first.

    Returns:
        output [T, D] in x's dtype, and the last W - 1 rows of [halo, piece] for each piece, [N, W - 1, D].

    Raises:
        ValueError: shapes that contradict the schema, or an unknown activation.
    """
    check_filter(x, weight, bias, activation)
    check_halo(weight, halo, count_sequences(cu_seqlens))
    return CAUSAL_CONV1D_HALO(x, weight, bias, cu_seqlens, halo, activation)


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
        x, weight, bias, state, slots, activation: as in the package's schema.
        null_slot: as in `causal_conv1d`.

    Returns:
        output [N, D] in x's dtype.

    Raises:
        ValueError: shapes that contradict the schema, or an unknown activation.
    """
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, x.shape[0])
    return CAUSAL_CONV1D_UPDATE(x, weight, bias, state, slots, activation, null_slot)


def causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    activation: str | None = "silu",
    null_slot: int | None = 0,
) -> Tensor:
    """Convolve a few drafted tokens per sequence, keeping what each of them would need if it were the last accepted.

    Args:
        x, weight, bias, cu_seqlens, state, slots, activation: as in the package's schema.
        num_accepted: [N] integers, at least 1: how many tokens of the sequence's previous call were accepted.
        null_slot: as in `causal_conv1d`.

    Returns:
        output [T, D] in x's dtype. The state of an empty sequence is left as it was.

    Raises:
        ValueError: shapes that contradict the schema, or an unknown activation.
    """
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("num_accepted", num_accepted, slots.shape[0])
    return CAUSAL_CONV1D_VERIFY(x, weight, bias, cu_seqlens, state, slots, num_accepted, activation, null_slot)


__all__ = [
    "CAUSAL_CONV1D",
    "CAUSAL_CONV1D_HALO",
    "CAUSAL_CONV1D_UPDATE",
    "CAUSAL_CONV1D_VERIFY",
    "OPERATIONS",
    "TOLERANCE",
    "causal_conv1d",
    "causal_conv1d_halo",
    "causal_conv1d_update",
    "causal_conv1d_verify",
]
