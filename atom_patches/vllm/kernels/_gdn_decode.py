"""vLLM's own GatedDeltaNet decode sequence."""

from __future__ import annotations

__all__: list[str] = []
