"""The whole inner part of a GatedDeltaNet layer, from the input projections to what the output norm takes.

    causal convolution and silu  ->  split into q, k, v  ->  l2 norm of q and k  ->  gating  ->  gated delta rule

Prefill (`gdn_prefill`) lives in `prefill*.py`, decode (`gdn_decode`) and the verification of drafted tokens
(`gdn_verify`) in `decode*.py`.
"""

from __future__ import annotations

from . import decode, prefill
from .decode import GDN_DECODE, GDN_VERIFY, gdn_decode, gdn_verify
from .prefill import GDN_PREFILL, GDN_PREFILL_SEGMENT, TOLERANCE, gdn_prefill, gdn_prefill_segment

OPERATIONS = (*prefill.OPERATIONS, *decode.OPERATIONS)

__all__ = [
    "GDN_DECODE",
    "GDN_PREFILL",
    "GDN_PREFILL_SEGMENT",
    "GDN_VERIFY",
    "OPERATIONS",
    "TOLERANCE",
    "gdn_decode",
    "gdn_prefill",
    "gdn_prefill_segment",
    "gdn_verify",
]
