"""The chunked operators of the gated delta rule in Triton."""

from __future__ import annotations

__all__: list[str] = []
