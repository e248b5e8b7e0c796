"""vLLM's own recurrent gated delta rule."""

from __future__ import annotations

__all__: list[str] = []
