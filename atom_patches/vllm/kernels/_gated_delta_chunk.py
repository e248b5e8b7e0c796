"""vLLM's own chunked gated delta rule: the Triton kernels of its flash-linear-attention package.

vLLM leaves the rows that no sequence owns unwritten, and subtracts sums of decays from each other, which gives NaN for
decays of -inf and blurs what lies between strong ones. What the operator promises beyond that costs a pass over g;
`timed_chunk_gated_delta_rule` is the call that vLLM makes. vLLM rounds the inverse of each chunk's triangular system to
the inputs' dtype: keys that are nearly all alike and do not decay can give up to twice the operator's tolerance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.model_executor.layers.fla.ops import chunk as fla
from vllm.model_executor.layers.fla.ops.utils import FLA_CHUNK_SIZE

from atom_patches.kernels.registry import YES, Verdict, no

_run: Any = fla.chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "supports_chunk_gated_delta_rule", "timed_chunk_gated_delta_rule"]

#: Logarithm of a decay that is 0 in float32; 64 of them still leave their neighbours 11 bits behind the point.
STRONGEST_DECAY = -104.0


def supports_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> Verdict:
    rule = supports_rule(v.shape[0], k.shape[2], q, k, v)
    return supports_plan(cu_seqlens) if rule.ok else rule


def supports_rule(rows: int, key_size: int, *tensors: Tensor) -> Verdict:
    """Whether vLLM's kernels serve q, k and v of these dtypes."""
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in (torch.bfloat16, torch.float16):
        return no("vLLM's kernels take q, k and v of one dtype, bfloat16 or float16")
    if key_size > 256:
        return no(f"vLLM's kernels keep at most 256 keys, not {key_size}")
    if rows == 0:
        return no("vLLM's kernels are not launched without rows")
    return YES


def supports_plan(cu_seqlens: Tensor) -> Verdict:
    """Whether the table of chunks is there or can be made now: its size is read from the device."""
    if cu_seqlens.shape[0] < 2:
        return no("vLLM's kernels are not launched without sequences")
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing() and _kept(cu_seqlens) is None:
        return no("vLLM counts the chunks before the layers run, outside CUDA graphs")
    return YES


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    g = g.clamp(min=STRONGEST_DECAY)
    output, final = timed_chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens, initial_state, scale, chunk_size)
    owned = plan_chunks(cu_seqlens).owned
    for rows in (output[: owned.start], output[owned.stop :]):
        if rows.shape[0]:
            rows.zero_()
    return output, final


def timed_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    plan = plan_chunks(cu_seqlens)
    if not plan.indices.shape[0]:
        return _without_rows(v, k.shape[2], cu_seqlens, initial_state)
    output, final = _run(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        chunk_indices=plan.indices,
        chunk_offsets=plan.offsets,
    )
    return output[0], final


def _without_rows(v: Tensor, key_size: int, cu_seqlens: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs where every sequence is empty: a launch of nothing would let Triton tune for it."""
    if initial_state is not None:
        return v.new_zeros(v.shape), initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    shape = (cu_seqlens.shape[0] - 1, *v.shape[1:], key_size)
    return v.new_zeros(v.shape), v.new_zeros(shape, dtype=torch.float32)


class Plan(NamedTuple):
    """vLLM's table of chunks: [M, 2] sequence and number in the sequence, and [N + 1] chunks before each sequence; and
    the rows that have an owner."""

    indices: Tensor
    offsets: Tensor
    owned: slice


_planned: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def plan_chunks(cu_seqlens: Tensor) -> Plan:
    """The table that vLLM makes once a step for all layers; kept as long as cu_seqlens lives unchanged."""
    if (kept := _kept(cu_seqlens)) is not None:
        return kept
    bounds = cu_seqlens.cpu()
    counts = (bounds.diff() + FLA_CHUNK_SIZE - 1) // FLA_CHUNK_SIZE
    offsets = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    number = torch.arange(sequence.numel()) - offsets[sequence]
    indices = torch.stack([sequence, number], dim=1)
    owned = slice(int(bounds[0]), int(bounds[-1]))
    plan = Plan(indices.to(cu_seqlens), offsets.to(cu_seqlens.device), owned)
    if not cu_seqlens.is_inference():
        _planned[cu_seqlens] = (cu_seqlens._version, plan)
    return plan


def _kept(cu_seqlens: Tensor) -> Plan | None:
    """The table made earlier; an inference tensor does not tell whether it was changed since."""
    found = None if cu_seqlens.is_inference() else _planned.get(cu_seqlens)
    return found[1] if found is not None and found[0] == cu_seqlens._version else None
