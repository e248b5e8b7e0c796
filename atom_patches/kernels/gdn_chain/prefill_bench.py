"""Benchmark shapes of `gdn_prefill`."""

from __future__ import annotations

CASES = ()
