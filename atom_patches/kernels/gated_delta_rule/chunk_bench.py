"""Benchmark shapes of the chunked operators."""

from __future__ import annotations

CASES = ()
