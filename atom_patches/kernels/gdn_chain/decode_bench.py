"""Benchmark shapes of `gdn_decode`."""

from __future__ import annotations

CASES = ()
