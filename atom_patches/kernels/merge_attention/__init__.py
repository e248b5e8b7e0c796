"""Combine attention over disjoint sets of keys into attention over all of them, by log-sum-exp.

For parts p with outputs out_p and log-sum-exps lse_p, for each row and head:

    lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) * out_p

Schema, T rows, H heads, P >= 1 parts:

    out_a, out_b  [T, H, D]         float32, bfloat16 or float16
    lse_a, lse_b  [T, H]            float32
    outs          [P, T, H, D]      the same for many parts
    lses          [P, T, H]
    out           [T, H, D]         in the parts' dtype, contiguous
    lse           [T, H]            float32; head-major in memory (strides 1, T), as `paged_attention` writes it

Any strides are admitted. Computed in float32. A part without keys has lse -inf (or +inf, FlashAttention 2's mark of
it) and out 0; where no part has keys the result is the same: out 0, lse -inf.

Source: section 2.2 of Z. Ye et al., "FlashInfer", 2025 (arXiv:2501.01005).
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per dtype of the parts; values are of order 1.
TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (8e-3, 2e-3), "float16": (1e-3, 3e-4)}


def room_like(out: Tensor) -> tuple[Tensor, Tensor]:
    """Room for a result of out's shape [T, H, D] and dtype, and its lse."""
    rows, heads, _ = out.shape
    return out.new_empty(out.shape), torch.empty(heads, rows, dtype=torch.float32, device=out.device).mT


def _fake_two(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return room_like(out_a)


def _fake_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return room_like(outs[0])


def _class_of(out: Tensor) -> str:
    rows = bucket(out.shape[0], (16, 64, 512, 4096))
    return f"{dtype_name(out.dtype)} h{out.shape[1]} d{out.shape[2]} rows{rows}"


def _class_two(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> str:
    return _class_of(out_a)


def _class_parts(outs: Tensor, lses: Tensor) -> str:
    return f"{_class_of(outs[0])} parts{bucket(outs.shape[0], (2, 4, 8))}"


MERGE_ATTENTION = Operation(
    package=__name__,
    name="merge_attention",
    schema="(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    reference=reference.merge_attention,
    fake=_fake_two,
    shape_class=_class_two,
    tolerance=TOLERANCE,
)
MERGE_ATTENTION_PARTS = Operation(
    package=__name__,
    name="merge_attention_parts",
    schema="(Tensor outs, Tensor lses) -> (Tensor, Tensor)",
    reference=reference.merge_attention_parts,
    fake=_fake_parts,
    shape_class=_class_parts,
    tolerance=TOLERANCE,
)
OPERATIONS = (MERGE_ATTENTION, MERGE_ATTENTION_PARTS)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two parts, out [T, H, D] and lse [T, H] each, into one of the same shapes.

    Raises:
        ValueError: shapes or dtypes that contradict the schema.
    """
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(f"the parts differ: {list(out_a.shape)} {out_a.dtype}, {list(out_b.shape)} {out_b.dtype}")
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        if out.dim() != 3 or lse.shape != out.shape[:2]:
            raise ValueError(f"out [T, H, D] and lse [T, H] are needed, got {list(out.shape)} and {list(lse.shape)}")
    return MERGE_ATTENTION(out_a, lse_a, out_b, lse_b)


def merge_attention_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine P >= 1 parts, outs [P, T, H, D] and lses [P, T, H], into out [T, H, D] and lse [T, H].

    Raises:
        ValueError: shapes that contradict the schema.
    """
    if outs.dim() != 4 or lses.shape != outs.shape[:3] or not outs.shape[0]:
        raise ValueError("outs [P, T, H, D] and lses [P, T, H] of at least one part are needed, "
                         f"got {list(outs.shape)} and {list(lses.shape)}")  # fmt: skip
    return MERGE_ATTENTION_PARTS(outs, lses)


__all__ = [
    "MERGE_ATTENTION", "MERGE_ATTENTION_PARTS", "OPERATIONS", "TOLERANCE", "merge_attention", "merge_attention_parts",
]  # fmt: skip
