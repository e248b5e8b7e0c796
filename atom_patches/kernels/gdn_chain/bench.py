"""Benchmark shapes of the package's operators."""

from __future__ import annotations

from . import decode_bench, prefill_bench

CASES = (*decode_bench.CASES, *prefill_bench.CASES)
