"""vLLM's own GatedDeltaNet prefill sequence."""

from __future__ import annotations

__all__: list[str] = []
