"""Qwen3-Next: three GatedDeltaNet layers to one of attention, experts in most layers."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import HybridConfig, read_config, read_experts, read_rotary
from atom_patches.models.decoder import HybridDecoder
from atom_patches.models.parts import Parts


def qwen3_next_config(hf: Any) -> HybridConfig:
    """From a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    dense: list[int] = getattr(hf, "mlp_only_layers", None) or []
    step: int = getattr(hf, "decoder_sparse_step", 1)
    sparse = tuple(
        hf.num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(hf.num_hidden_layers)
    )
    experts = read_experts(hf, renormalise=hf.norm_topk_prob) if any(sparse) else None
    return read_config(hf, sparse, experts, read_rotary(hf))


def qwen3_next(hf: Any, parts: Parts, *, prefix: str = "model") -> HybridDecoder:
    """The decoder of a checkpoint's configuration."""
    return HybridDecoder(qwen3_next_config(hf), parts, prefix=prefix)
