"""`gdn_decode` in Triton."""

from __future__ import annotations

__all__: list[str] = []
