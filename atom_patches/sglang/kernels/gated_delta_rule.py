"""SGLang's chunked gated delta rule, which updates a pool of states in place. Its recurrent kernels take the gates'
inputs, not the gates: see `gdn_chain`.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule as update_pool
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

from ._slots import padded_rows


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
    return supports_pool(k, v)


def supports_pool(k: Tensor, v: Tensor) -> Verdict:
    """Whether the chunked kernels take such keys and values."""
    if k.dtype != v.dtype or k.element_size() != 2:
        return no(f"SGLang's kernel takes keys and values of one half precision, not {k.dtype} and {v.dtype}")
    if not v.shape[0]:
        return no("SGLang's kernel is not launched for zero rows")
    if k.shape[2] > 256:
        return no(f"SGLang's kernel has no heads of {k.shape[2]}")
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
    o, *_ = update_pool(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None].float(),
        beta=beta[None],
        scale=scale,
        initial_state=state,
        initial_state_indices=slots,
        cu_seqlens=cu_seqlens,
    )
    return o[0].masked_fill(padded_rows(cu_seqlens, slots, v.shape[0])[:, None, None], 0.0), state
