"""SGLang's merge of two partial attentions; it has none for more parts.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sgl_kernel import merge_state_v2
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no


def supports_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Verdict:
    if not out_a.numel():
        return no("SGLang launches no kernel for zero rows")
    if not all(tensor.is_contiguous() for tensor in (out_a, lse_a, out_b, lse_b)):
        return no("SGLang's kernel takes contiguous tensors")
    if out_a.shape[2] * out_a.element_size() % 16:
        return no("SGLang's kernel reads 16 bytes at a time")
    return YES


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge_state_v2(out_a, lse_a, out_b, lse_b)
