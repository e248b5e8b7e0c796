"""Benchmark shapes of the recurrent operators."""

from __future__ import annotations

CASES = ()
