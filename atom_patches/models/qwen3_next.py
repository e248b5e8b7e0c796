"""Qwen3-Next: three GatedDeltaNet layers to one of attention, experts in most layers."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import DecoderConfig, read_experts, read_hybrid, read_sparse
from atom_patches.models.decoder import Decoder
from atom_patches.models.parts import Parts


def qwen3_next_config(hf: Any) -> DecoderConfig:
    """From a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    sparse = read_sparse(hf)
    experts = read_experts(hf, renormalise=hf.norm_topk_prob) if any(sparse) else None
    return read_hybrid(hf, sparse, experts)


def qwen3_next(hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The decoder of a checkpoint's configuration."""
    return Decoder(qwen3_next_config(hf), parts, prefix=prefix)
