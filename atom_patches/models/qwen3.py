"""Qwen3, dense: as Llama, with normed queries and keys."""

from __future__ import annotations

from typing import Any

from atom_patches.models.config import DecoderConfig, read_dense
from atom_patches.models.decoder import Decoder
from atom_patches.models.parts import Parts


def qwen3_config(hf: Any) -> DecoderConfig:
    """From a checkpoint's configuration.

    Raises:
        ValueError: it asks for something that the decoder does not compute.
    """
    return read_dense(hf, (False,) * hf.num_hidden_layers, None, qk_norm=True)


def qwen3(hf: Any, parts: Parts, *, prefix: str = "model") -> Decoder:
    """The decoder of a checkpoint's configuration."""
    return Decoder(qwen3_config(hf), parts, prefix=prefix)
