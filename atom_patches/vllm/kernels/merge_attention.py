"""vLLM's `merge_attn_states`: two parts in one kernel; more parts, of float32 only, one after another.

Every call rounds what it merged to the parts' dtype: in half precision a chain of calls leaves the tolerance.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from atom_patches.kernels.registry import YES, Verdict, no


def available() -> Verdict:
    if current_platform.is_cuda():
        return YES
    return no("elsewhere than on NVIDIA GPUs vLLM's merge gives NaN where neither part has keys")


def supports_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Verdict:
    if out_a.shape[2] % (16 // out_a.element_size()):
        return no(f"a head of {out_a.shape[2]} values is not a multiple of 16 bytes")
    if not (out_a.is_contiguous() and out_b.is_contiguous()):
        return no("the parts must be contiguous")
    if not (lse_a.mT.is_contiguous() and lse_b.mT.is_contiguous()):
        return no("the log-sum-exps must be head-major in memory")
    return YES


def supports_merge_attention_parts(outs: Tensor, lses: Tensor) -> Verdict:
    if outs.shape[0] > 2 and outs.dtype != torch.float32:
        return no(f"vLLM's kernel merges two parts and would round {outs.shape[0]} to {outs.dtype} in between")
    return supports_merge_attention(outs[0], lses[0], outs[-1], lses[-1])


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, _ = out_a.shape
    out = out_a.new_empty(out_a.shape)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=out_a.device)
    if out.numel():
        merge_attn_states(out, out_a, lse_a.mT, out_b, lse_b.mT, lse)
    return out, lse.mT


def merge_attention_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = outs[0], lses[0]
    if outs.shape[0] == 1:
        empty = lse.isinf()
        return out.clone(), lse.mT.masked_fill(empty.mT, -torch.inf).mT
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge_attention(out, lse, part, part_lse)
    return out, lse
