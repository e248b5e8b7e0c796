"""`gdn_decode` in plain torch."""

from __future__ import annotations

__all__: list[str] = []
