"""The inner part of a GatedDeltaNet layer over a step's sequences, whatever each of them does in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_patches.kernels.gdn_chain import gdn_decode, gdn_prefill
from atom_patches.models.gdn_draft import verify_drafts
from atom_patches.runtime.gdn import GdnBinding, LayerStates


@dataclass(frozen=True)
class GdnWeights:
    """One rank's part of a layer.

    Attributes:
        conv: `[channels, taps]`.
        A_log, dt_bias: `[value heads]`, float32.
    """

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor


def run_sequences(
    mixed: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, binding: GdnBinding, states: LayerStates
) -> Tensor:
    """From the projections of all rows to the outputs; states are updated in place.

    Args:
        mixed: `[rows, channels]`, queries, keys and values before the convolution.
        a, b: `[rows, value heads]`, what the decay and the write strength are made of.

    Returns:
        `[rows, value heads, value size]`; rows of padding are 0.
    """
    rows, (heads, size) = mixed.shape[0], states.temporal.shape[1:3]
    pieces: list[Tensor] = []
    done = 0
    if binding.decodes:
        done = binding.decodes
        pieces.append(_decode(mixed[:done], a[:done], b[:done], weights, binding, states))
    if binding.verifies:
        start, done = done, binding.rows_before_prefills
        pieces.append(
            verify_drafts(
                mixed[start:done], a[start:done], b[start:done], binding, states,
                conv_weight=weights.conv, A_log=weights.A_log, dt_bias=weights.dt_bias,
            )
        )  # fmt: skip
    if binding.prefills:
        pieces.append(_prefill(mixed[done:], a[done:], b[done:], weights, binding, states))
    elif done < rows:
        pieces.append(mixed.new_zeros(rows - done, heads, size))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _decode(
    mixed: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, binding: GdnBinding, states: LayerStates
) -> Tensor:
    return gdn_decode(
        mixed, a, b, conv_weight=weights.conv, conv_bias=None, conv_state=states.conv, ssm_state=states.temporal,
        slots=binding.slots[: binding.decodes], A_log=weights.A_log, dt_bias=weights.dt_bias,
        null_slot=binding.null_slot,
    )  # fmt: skip


def _prefill(
    mixed: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, binding: GdnBinding, states: LayerStates
) -> Tensor:
    first = binding.first_prefill
    return gdn_prefill(
        mixed, a, b, conv_weight=weights.conv, conv_bias=None, conv_state=states.conv, ssm_state=states.temporal,
        slots=binding.slots[first:], has_initial_state=binding.has_initial_state[first:],
        cu_seqlens=binding.prefill_start_loc, A_log=weights.A_log, dt_bias=weights.dt_bias,
        null_slot=binding.null_slot,
    )  # fmt: skip
