"""DeepSeek-V3.2: as V3, with an indexer that selects the tokens which a layer attends to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atom_patches.models.config import DecoderConfig
from atom_patches.models.decoder import Decoder
from atom_patches.models.deepseek_v3 import read_latent
from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.parts import Parts


def deepseek_v32_config(hf: Any) -> DecoderConfig:
    """From a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    for name in ("index_topk_freq", "cli_factor"):
        if (getattr(hf, name, 1) or 1) > 1:
            raise ValueError(f"{name} must be 1, got {getattr(hf, name)!r}: each layer selects for itself")
    if "S" in (getattr(hf, "index_topk_pattern", None) or ""):
        raise ValueError(f"index_topk_pattern must name no S, got {hf.index_topk_pattern!r}: each layer selects")
    indexer = IndexerShape(
        heads=hf.index_n_heads,
        head_size=hf.index_head_dim,
        rope_size=hf.qk_rope_head_dim,
        top_k=hf.index_topk,
        interleaved=bool(getattr(hf, "indexer_rope_interleave", False)),
    )
    return replace(read_latent(hf), indexer=indexer)


def deepseek_v32(hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The decoder of a checkpoint's configuration."""
    return Decoder(deepseek_v32_config(hf), parts, prefix=prefix)
