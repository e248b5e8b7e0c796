"""The recurrent operators of the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import recurrent_reference
from ._shared import TOLERANCE, default_scale
from .recurrent_reference import check_draft, check_step

_PACKAGE = __name__.rpartition(".")[0]


def _like_v(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _class(k: Tensor, v: Tensor, state: Tensor) -> str:
    rows = bucket(v.shape[0], (1, 16, 64, 256))
    heads = f"h{k.shape[1]}:{v.shape[1]} k{k.shape[2]} v{v.shape[2]}"
    return f"{dtype_name(v.dtype)} {heads} state {dtype_name(state.dtype)} rows{rows}"


def _step_class(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *_: object) -> str:
    return _class(k, v, state)


def _draft_class(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state: Tensor, *_: object
) -> str:
    return _class(k, v, state)


RECURRENT_GATED_DELTA_RULE = Operation(
    package=_PACKAGE,
    name="recurrent_gated_delta_rule",
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor slots, float scale, "
    "int? null_slot) -> Tensor",
    reference=recurrent_reference.recurrent_gated_delta_rule,
    fake=_like_v,
    shape_class=_step_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
VERIFY_GATED_DELTA_RULE = Operation(
    package=_PACKAGE,
    name="verify_gated_delta_rule",
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor(a!) state, Tensor slots, "
    "Tensor num_accepted, float scale, int? null_slot) -> Tensor",
    reference=recurrent_reference.verify_gated_delta_rule,
    fake=_like_v,
    shape_class=_draft_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (RECURRENT_GATED_DELTA_RULE, VERIFY_GATED_DELTA_RULE)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    slots: Tensor,
    scale: float | None = None,
    null_slot: int | None = 0,
) -> Tensor:
    """Advance one token per row against a pool of states, which is updated in place.

    Args:
        q, k, v, g, beta: as in the package's schema, with T = number of rows.
        state: [S, HV, V, K], any strides and floating dtype.
        slots: [T] integers, the state of each row. Negative entries and `null_slot` are padding: their
            output is 0 and no state is touched. The others must be distinct.
        scale: factor of the output; None means K ** -0.5.
        null_slot: slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        output [T, HV, V] in v's dtype.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    check_step(q, k, v, g, beta, state, slots)
    scale = default_scale(k) if scale is None else scale
    return RECURRENT_GATED_DELTA_RULE(q, k, v, g, beta, state, slots, scale, null_slot)


def verify_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    scale: float | None = None,
    null_slot: int | None = 0,
) -> Tensor:
    """Advance a few drafted tokens per sequence, keeping the state behind each of them in a slot of its own.

    Sequence i starts from the state in slots[i, num_accepted[i] - 1], which its previous call left behind the last
    token that was accepted, and leaves the state behind its token j in slots[i, j].

    Args:
        q, k, v, g, beta: as in the package's schema; rows outside every sequence are not read and give 0.
        cu_seqlens: [N + 1] integers, non-decreasing, from 0: sequence i owns the rows from cu_seqlens[i] up to, not
            including, cu_seqlens[i + 1], at most n of them.
        state: [S, HV, V, K], any strides and floating dtype.
        slots: [N, n] integers; distinct where they are not padding (negative, or `null_slot`). A sequence that would
            start from padding is padding: its output is 0 and no state is touched. Elsewhere a padding slot only
            leaves the state behind that token unwritten.
        num_accepted: [N] integers, 1 to n; 1 behind a prefill or a decode step into slots[:, 0].
        scale: factor of the output; None means K ** -0.5.
        null_slot: slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        output [T, HV, V] in v's dtype.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    check_draft(q, k, v, g, beta, cu_seqlens, state, slots, num_accepted)
    scale = default_scale(k) if scale is None else scale
    return VERIFY_GATED_DELTA_RULE(q, k, v, g, beta, cu_seqlens, state, slots, num_accepted, scale, null_slot)


__all__ = [
    "OPERATIONS",
    "RECURRENT_GATED_DELTA_RULE",
    "VERIFY_GATED_DELTA_RULE",
    "recurrent_gated_delta_rule",
    "verify_gated_delta_rule",
]
