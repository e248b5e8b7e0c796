"""Gated delta rule: the recurrence of GatedDeltaNet layers, chunked for prefill and one step for decode.

For one sequence and one value head, with a state S of shape [V, K] and one token (q, k, v, g, beta):

    S <- exp(g) * S                      decay
    S <- S + beta * (v - S k) k^T        write what the state got wrong about k
    o  = scale * S q                     read

Schema, T tokens in N sequences, HK query/key heads, HV value heads (HV a multiple of HK: key head h serves
the value heads h*HV/HK ... (h+1)*HV/HK - 1), key size K, value size V:

    q, k     [T, HK, K]   floating; not normalised here (see `kernels.l2norm`)
    v        [T, HV, V]   floating
    g        [T, HV]      natural logarithm of the decay, at most 0; -inf forgets everything
    beta     [T, HV]      write strength
    state    [N, HV, V, K] (prefill) or [S, HV, V, K] (decode, S slots), any floating dtype
    output   [T, HV, V]   in v's dtype

Any strides are admitted. The arithmetic is float32 (the cumulated decay float64) whatever the input dtypes
are.

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024
(arXiv:2412.06464), sections 3.2 and 3.3.
"""

from __future__ import annotations

from . import chunk, recurrent
from ._shared import TOLERANCE
from .chunk import (
    CHUNK_GATED_DELTA_RULE,
    CHUNK_GATED_DELTA_RULE_SEGMENT,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_segment,
)
from .recurrent import (
    RECURRENT_GATED_DELTA_RULE,
    VERIFY_GATED_DELTA_RULE,
    recurrent_gated_delta_rule,
    verify_gated_delta_rule,
)

#: Every operator of the package. The chunked ones (prefill) live in `chunk*.py`, the recurrent ones (decode and
#: verification of drafted tokens) in `recurrent*.py`.
OPERATIONS = (*chunk.OPERATIONS, *recurrent.OPERATIONS)

__all__ = [
    "CHUNK_GATED_DELTA_RULE",
    "CHUNK_GATED_DELTA_RULE_SEGMENT",
    "OPERATIONS",
    "RECURRENT_GATED_DELTA_RULE",
    "TOLERANCE",
    "VERIFY_GATED_DELTA_RULE",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_segment",
    "recurrent_gated_delta_rule",
    "verify_gated_delta_rule",
]
