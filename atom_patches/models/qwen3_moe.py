"""Qwen3 with experts in most layers, none of them shared."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import DecoderConfig, read_dense, read_experts, read_sparse
from atom_patches.models.decoder import Decoder
from atom_patches.models.parts import Parts


def qwen3_moe_config(hf: Any) -> DecoderConfig:
    """From a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    sparse = read_sparse(hf)
    experts = read_experts(hf, renormalise=hf.norm_topk_prob) if any(sparse) else None
    return read_dense(hf, sparse, experts, qk_norm=True)


def qwen3_moe(hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The decoder of a checkpoint's configuration."""
    return Decoder(qwen3_moe_config(hf), parts, prefix=prefix)
