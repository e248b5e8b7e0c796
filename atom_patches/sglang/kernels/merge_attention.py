"""SGLang's merge of two partial attentions; it has none for more parts.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sgl_kernel import merge_state_v2
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no


def supports_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Verdict:
    if not out_a.numel():
        return no("SGLang launches no kernel for zero rows")
    if not (out_a.is_contiguous() and out_b.is_contiguous()):
        return no("SGLang's kernel takes contiguous parts")
    if out_a.shape[2] * out_a.element_size() % 16:
        return no("SGLang's kernel reads 16 bytes at a time")
    return YES


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = timed_merge_attention(out_a, lse_a, out_b, lse_b)
    # Where neither part has keys the kernel divides zero by zero.
    empty = lse_a.isinf() & lse_b.isinf()
    lse = lse.masked_fill(empty, -torch.inf)
    return out.masked_fill(empty[:, :, None], 0.0), lse.mT.contiguous().mT


def timed_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """What SGLang itself runs: rows without keys do not occur."""
    return merge_state_v2(out_a, lse_a.contiguous(), out_b, lse_b.contiguous())
