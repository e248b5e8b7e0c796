"""The chunked operators of the gated delta rule."""

from __future__ import annotations

from .chunk_reference import chunk_gated_delta_rule

OPERATIONS = ()

__all__ = ["OPERATIONS", "chunk_gated_delta_rule"]
