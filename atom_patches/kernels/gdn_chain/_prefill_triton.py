"""`gdn_prefill` in Triton."""

from __future__ import annotations

__all__: list[str] = []
