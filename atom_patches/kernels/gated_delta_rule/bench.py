"""Benchmark shapes of the package's operators."""

from __future__ import annotations

from . import chunk_bench, recurrent_bench

CASES = (*chunk_bench.CASES, *recurrent_bench.CASES)
