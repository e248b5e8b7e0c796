"""How a token's latent and rope values lie in its row of the paged cache."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from atom_patches.kernels import e4m3

#: Latent values that share a scale in the packed layout.
GROUP = 128


class Layout(Enum):
    """See the package's schema."""

    PLAIN = "plain"
    SCALED = "scaled"
    PACKED = "packed"


class Parts(NamedTuple):
    """The cache as typed views of its memory.

    Attributes:
        latent: [B, P, L], in the cache's dtype, or E4M3.
        scales: [B, P, L / 128] float32 in the packed layout, else None.
        rope: [B, P, R], in the cache's dtype, E4M3, or bfloat16 in the packed layout.
    """

    layout: Layout
    latent: Tensor
    scales: Tensor | None
    rope: Tensor


def packed_bytes(latent_size: int, rope_size: int) -> int:
    """Bytes of a packed row: 656 for a latent of 512 and a rope part of 64."""
    return latent_size + latent_size // GROUP * 4 + rope_size * 2


def layout_of(cache: Tensor, latent_size: int, rope_size: int) -> Layout:
    """The layout of a cache [B, P, ROW], told by its dtype and the size of its rows.

    Raises:
        ValueError: it is none of them.
    """
    row, wide = cache.shape[-1], latent_size + rope_size
    if cache.dtype in (torch.bfloat16, torch.float16, torch.float32):
        if row == wide:
            return Layout.PLAIN
    elif cache.dtype in (torch.uint8, e4m3.DTYPE):
        if row == wide:
            return Layout.SCALED
        if latent_size % GROUP == 0 and row == packed_bytes(latent_size, rope_size):
            return Layout.PACKED
    raise ValueError(
        f"a cache of {cache.dtype} with rows of {row} is none for a latent of {latent_size} and a rope part of "
        f"{rope_size}: rows of {wide} in a floating dtype or E4M3 bytes, or packed rows of "
        f"{packed_bytes(latent_size, rope_size)} bytes"
    )


def parts_of(cache: Tensor, latent_size: int, rope_size: int) -> Parts:
    """Views of the cache's memory; nothing is copied."""
    layout = layout_of(cache, latent_size, rope_size)
    if layout is Layout.PACKED:
        raw = cache.view(torch.uint8)
        end = latent_size + latent_size // GROUP * 4
        scales, rope = raw[..., latent_size:end].view(torch.float32), raw[..., end:].view(torch.bfloat16)
        return Parts(layout, raw[..., :latent_size].view(e4m3.DTYPE), scales, rope)
    typed = cache.view(e4m3.DTYPE) if layout is Layout.SCALED else cache
    return Parts(layout, typed[..., :latent_size], None, typed[..., latent_size:])


__all__ = ["GROUP", "Layout", "Parts", "layout_of", "packed_bytes", "parts_of"]
