"""The chunked operators of the gated delta rule: ragged prefill, and the map that a segment is."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import chunk_reference as reference
from ._shared import TOLERANCE, check_shapes, default_scale
from .chunk_reference import CHUNK_SIZE

_PACKAGE = __package__ or ""


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    states = (cu_seqlens.shape[0] - 1, v.shape[1], v.shape[2], k.shape[2])
    return v.new_empty(v.shape), v.new_empty(states, dtype=torch.float32)


def _fake_segment(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    num_seqs, heads, size = cu_seqlens.shape[0] - 1, v.shape[1], k.shape[2]
    ends = v.new_empty((num_seqs, heads, v.shape[2], size), dtype=torch.float32)
    return ends, v.new_empty((num_seqs, heads, size, size), dtype=torch.float32)


def _shape_class(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *rest: object) -> str:
    return _class(k, v, cu_seqlens)


def _segment_class(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> str:
    return _class(k, v, cu_seqlens)


def _class(k: Tensor, v: Tensor, cu_seqlens: Tensor) -> str:
    heads = f"h{k.shape[1]}:{v.shape[1]} k{k.shape[2]} v{v.shape[2]}"
    sequences = bucket(cu_seqlens.shape[0] - 1, (8,))
    return f"{dtype_name(k.dtype)} {heads} rows{bucket(v.shape[0], (4096,))} sequences{sequences}"


CHUNK_GATED_DELTA_RULE = Operation(
    package=_PACKAGE,
    name="chunk_gated_delta_rule",
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, "
    "float scale, int chunk_size) -> (Tensor, Tensor)",
    reference=reference.chunk_gated_delta_rule,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
    unmeasured=("triton", "engine", "torch"),  # bindings of engines wait for the device
)
CHUNK_GATED_DELTA_RULE_SEGMENT = Operation(
    package=_PACKAGE,
    name="chunk_gated_delta_rule_segment",
    schema="(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens) -> (Tensor, Tensor)",
    reference=reference.chunk_gated_delta_rule_segment,
    fake=_fake_segment,
    shape_class=_segment_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (CHUNK_GATED_DELTA_RULE, CHUNK_GATED_DELTA_RULE_SEGMENT)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Run the rule over ragged sequences.

    Args:
        q, k, v, g, beta: as in the package's schema; rows outside every sequence are ignored.
        cu_seqlens: [N + 1] integers, non-decreasing: sequence i owns the rows from cu_seqlens[i] up to, not
            including, cu_seqlens[i + 1]. The reference reads it on the host, the other providers do not.
        initial_state: [N, HV, V, K] or None (zeros); any strides, so that states kept as [N, HV, K, V] come as a
            transposed view. Not modified.
        scale: factor of the output; None means K ** -0.5.
        chunk_size: tokens per chunk of the reference; changes rounding, not the result. Other providers have
            their own.

    Returns:
        output [T, HV, V] in v's dtype (rows outside every sequence are 0), and
        the final states [N, HV, V, K] in float32; those of empty sequences are their initial states.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    check_shapes(q, k, v, g, beta)
    state_shape = (cu_seqlens.numel() - 1, v.shape[1], v.shape[2], k.shape[2])
    if initial_state is not None and tuple(initial_state.shape) != state_shape:
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected {state_shape}")
    factor = default_scale(k) if scale is None else scale
    return CHUNK_GATED_DELTA_RULE(q, k, v, g, beta, cu_seqlens, initial_state, factor, chunk_size)


def chunk_gated_delta_rule_segment(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """What each sequence does to whatever state it starts from: S_end = N + S_0 E.

    A long sequence cut into segments is so scanned in parallel: of two adjacent segments the pair is
    (N_2 + N_1 E_2, E_1 E_2). The queries play no part.

    Args:
        k, v, g, beta, cu_seqlens: as for `chunk_gated_delta_rule`.

    Returns:
        N [N, HV, V, K], the final states from zeros, and E [N, HV, K, K], both float32; of an empty sequence they
        are zeros and the identity.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    check_shapes(k, k, v, g, beta)
    return CHUNK_GATED_DELTA_RULE_SEGMENT(k, v, g, beta, cu_seqlens)


__all__ = [
    "CHUNK_GATED_DELTA_RULE",
    "CHUNK_GATED_DELTA_RULE_SEGMENT",
    "OPERATIONS",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_segment",
]
