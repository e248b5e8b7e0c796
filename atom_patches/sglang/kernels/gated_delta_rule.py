"""SGLang's chunked gated delta rule, which updates a pool of states in place. Its recurrent kernels take the gates'
inputs, not the gates: see `gdn_chain`.

SGLang subtracts sums of decays from each other, which blurs what lies between strong ones, leaves the rows that no
sequence owns unwritten, and miscounts the chunks behind a sequence without rows: all of that is mended here. It rounds
the inverse of each chunk's triangular system to the inputs' dtype, which is coarse for keys that are nearly all alike.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule as update_pool
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

from ._slots import padded_rows, supports_batch, without_empty

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
    batch = supports_batch(cu_seqlens)
    return supports_rule(v.shape[0], k.shape[2], q, k, v) if batch.ok else batch


def supports_rule(rows: int, key_size: int, *tensors: Tensor) -> Verdict:
    """Whether the chunked kernels take queries, keys and values of these dtypes."""
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].element_size() != 2:
        return no("SGLang's kernel takes queries, keys and values of one half precision")
    if not rows:
        return no("SGLang's kernel is not launched for zero rows")
    if key_size > 256:
        return no(f"SGLang's kernel has no heads of {key_size}")
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
    shape = (cu_seqlens.shape[0] - 1, v.shape[1], v.shape[2], k.shape[2])
    state = torch.zeros(shape, dtype=torch.float32, device=v.device)
    if initial_state is not None:
        state.copy_(initial_state)
    slots = torch.arange(shape[0], dtype=torch.int32, device=v.device)
    bounds, filled = without_empty(cu_seqlens, slots)
    if not filled.shape[0]:
        return v.new_zeros(v.shape), state
    o, *_ = update_pool(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None].float().clamp(min=STRONGEST_DECAY),
        beta=beta[None],
        scale=scale,
        initial_state=state,
        initial_state_indices=filled,
        cu_seqlens=bounds,
    )
    return o[0].masked_fill(padded_rows(cu_seqlens, slots, v.shape[0])[:, None, None], 0.0), state
