"""SGLang's merge of two partial attentions; it has none for more parts.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sgl_kernel import merge_state_v2
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

NO_KEYS = -1e30
"""Instead of -inf: of two such parts, whose outputs are 0, SGLang's kernel would divide zero by zero."""


def supports_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Verdict:
    if not out_a.numel():
        return no("SGLang launches no kernel for zero rows")
    if not (out_a.is_contiguous() and out_b.is_contiguous()):
        return no("SGLang's kernel takes contiguous parts")
    if out_a.shape[2] * out_a.element_size() % 16:
        return no("SGLang's kernel reads 16 bytes at a time")
    return YES


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = merge_state_v2(out_a, _finite(lse_a), out_b, _finite(lse_b))
    rows, heads = lse.shape
    marked = torch.empty(heads, rows, dtype=torch.float32, device=lse.device).mT
    return out, torch.threshold(lse, NO_KEYS / 2, -torch.inf, out=marked)


def _finite(lse: Tensor) -> Tensor:
    """A copy, contiguous, in which `NO_KEYS` marks a part without keys."""
    room = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    return torch.nan_to_num(lse, nan=torch.nan, posinf=NO_KEYS, neginf=NO_KEYS, out=room)


def timed_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """What SGLang itself runs: rows without keys do not occur."""
    return merge_state_v2(out_a, lse_a.contiguous(), out_b, lse_b.contiguous())
