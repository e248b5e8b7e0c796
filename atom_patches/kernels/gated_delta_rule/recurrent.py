"""The recurrent operators of the gated delta rule."""

from __future__ import annotations

from .recurrent_reference import recurrent_gated_delta_rule

OPERATIONS = ()

__all__ = ["OPERATIONS", "recurrent_gated_delta_rule"]
