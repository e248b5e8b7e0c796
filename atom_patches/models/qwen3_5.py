"""Qwen3.5, dense and with experts: as Qwen3-Next, with positions in time, height and width."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import HybridConfig, read_config, read_experts, read_rotary
from atom_patches.models.decoder import HybridDecoder
from atom_patches.models.parts import Parts


def qwen3_5_config(hf: Any) -> HybridConfig:
    """From the text part of a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    has_experts = hf.model_type.startswith("qwen3_5_moe")
    experts = read_experts(hf, renormalise=True) if has_experts else None
    return read_config(hf, (has_experts,) * hf.num_hidden_layers, experts, read_rotary(hf))


def qwen3_5(hf: Any, parts: Parts, *, prefix: str = "model") -> HybridDecoder:
    """The decoder of a checkpoint's text configuration, alone or within a vision-language wrapper."""
    return HybridDecoder(qwen3_5_config(hf), parts, prefix=prefix)
