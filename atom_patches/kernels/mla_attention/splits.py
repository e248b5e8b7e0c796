"""Runs a kernel of latent attention over parts of the keys, and merges what the parts gave."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from . import _kernels

Launch = Callable[[Tensor, Tensor], None]
"""Writes an output and a log-sum-exp: of all keys, or, with a first axis, of each part of them."""

MERGED, NARROWEST = 4096, 64
"""Values that a program merges, in registers, and columns of its result: on an H200 whole latents of 512 from up to
8 parts took 18.1 and 33.0 us with the attention, quarters of them 20.2 and 53.2 (16 rows of 16 and of 128 heads)."""


def in_splits(launch: Launch, q: Tensor, value_size: int, splits: int) -> tuple[Tensor, Tensor]:
    """The output [T, H, value_size] in q's dtype and the log-sum-exp [T, H] float32.

    Args:
        launch: gets out [splits, T * H, value_size] and lse [splits, T * H] in float32 for more than one split.
        q: [T, H, D].
        splits: parts of the keys, a power of two.
    """
    tokens, heads = q.shape[:2]
    out = torch.empty(tokens, heads, value_size, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    if splits == 1:
        launch(out, lse)
        return out, lse
    parts = torch.empty(splits, tokens * heads, value_size, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(splits, tokens * heads, dtype=torch.float32, device=q.device)
    launch(parts, part_lse)
    width = min(triton.next_power_of_2(value_size), max(NARROWEST, MERGED // splits))
    _kernels.merge[(tokens * heads, triton.cdiv(value_size, width))](
        parts, part_lse, out, lse, tokens * heads, L=value_size, WIDTH=width, SPLITS=splits, num_warps=4
    )
    return out, lse


__all__ = ["in_splits"]
