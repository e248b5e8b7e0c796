"""vLLM's own chunked gated delta rule."""

from __future__ import annotations

__all__: list[str] = []
