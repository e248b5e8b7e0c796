"""Qwen3.5, dense and with experts: as Qwen3-Next, with positions in time, height and width."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import DecoderConfig, read_experts, read_hybrid
from atom_patches.models.decoder import Decoder
from atom_patches.models.parts import Parts


def qwen3_5_config(hf: Any) -> DecoderConfig:
    """From the text part of a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    has_experts = hf.model_type.startswith("qwen3_5_moe")
    experts = read_experts(hf, renormalise=True) if has_experts else None
    return read_hybrid(hf, (has_experts,) * hf.num_hidden_layers, experts)


def qwen3_5(hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The decoder of a checkpoint's text configuration, alone or within a vision-language wrapper."""
    return Decoder(qwen3_5_config(hf), parts, prefix=prefix)
