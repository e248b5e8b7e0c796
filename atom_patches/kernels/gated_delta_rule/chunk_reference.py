"""The chunked gated delta rule in plain torch: matrix form within chunks, a scan over them.

Within a chunk that starts from state S0, with b_t the decay cumulated up to and including token t and
u_t = beta_t (v_t - S'_t k_t) what token t writes (S'_t: the decayed state before the write), unrolling gives

    u_t + sum_{s<t} beta_t e^{b_t-b_s} (k_t.k_s) u_s  =  beta_t v_t - beta_t e^{b_t} S0 k_t

a unit lower triangular system (I + L) u = rhs whose right side is linear in S0. Solving it for the part
without S0 and for the factor of S0 (W) leaves only matrix products to the scan that carries the state from
chunk to chunk. Every exponent is b_t - b_s with s <= t, hence at most 0: nothing can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_SIZE = 64

# exp() of anything below -104 is exactly 0 in float32, so this bound changes no result; it keeps -inf out
# of b_t - b_s.
_LOG_ZERO = -200.0

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_segment"]


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
    """See `chunk.chunk_gated_delta_rule`."""
    heads_per_key = v.shape[1] // k.shape[1]
    state_shape = (cu_seqlens.numel() - 1, v.shape[1], v.shape[2], k.shape[2])
    if initial_state is None:
        state = torch.zeros(state_shape, dtype=torch.float32, device=v.device)
    else:
        state = initial_state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    plan = _plan_chunks(cu_seqlens, chunk_size, v.device)
    if plan is None:
        return output, state

    chunks = _solve_chunks(
        _into_chunks(q, plan).repeat_interleave(heads_per_key, dim=1) * scale,
        _into_chunks(k, plan).repeat_interleave(heads_per_key, dim=1),
        _into_chunks(v, plan),
        _into_chunks(g[..., None], plan)[..., 0],
        _into_chunks(beta[..., None], plan)[..., 0],
    )
    output[plan.token[plan.valid]] = _scan(chunks, plan, state)[plan.valid].to(v.dtype)
    return output, state


def chunk_gated_delta_rule_segment(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """See `chunk.chunk_gated_delta_rule_segment`: the map is the state's own way without writes, from each row of
    the identity."""
    size = k.shape[2]
    _, ends = chunk_gated_delta_rule(k, k, v, g, beta, cu_seqlens, None, 1.0, CHUNK_SIZE)
    nothing = torch.zeros(*v.shape[:2], size, device=v.device)
    identity = torch.eye(size, device=v.device).expand(len(ends), v.shape[1], size, size)
    _, maps = chunk_gated_delta_rule(k, k, nothing, g, beta, cu_seqlens, identity, 1.0, CHUNK_SIZE)
    return ends, maps


@dataclass(frozen=True)
class _Chunks:
    """Where the C tokens of each of M chunks come from, and which chunk of which sequence each scan step
    takes."""

    token: Tensor  # [M, C] row of each place in a chunk, clamped where it is not valid
    valid: Tensor  # [M, C] False behind the end of a sequence
    steps: list[tuple[Tensor, Tensor]]  # per scan step: (sequences still running, their chunks)


def _plan_chunks(cu_seqlens: Tensor, chunk_size: int, device: torch.device) -> _Chunks | None:
    """Cut every sequence into chunks of equal size; None without a token."""
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = bounds.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest == 0:
        return None
    size = min(chunk_size, longest)
    counts = (lengths + size - 1) // size
    first = counts.cumsum(0) - counts
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    start = bounds[owner] + (torch.arange(len(owner)) - first[owner]) * size
    token = start[:, None] + torch.arange(size)
    end = bounds[owner + 1][:, None]
    steps: list[tuple[Tensor, Tensor]] = []
    for step in range(int(counts.max())):
        running = (counts > step).nonzero()[:, 0]
        steps.append((running.to(device), (first[running] + step).to(device)))
    return _Chunks(token.minimum(end - 1).to(device), (token < end).to(device), steps)


def _into_chunks(x: Tensor, plan: _Chunks) -> Tensor:
    """[T, H, D] -> float32 [M, H, C, D]; zeros behind the end of a sequence make a token that neither
    decays nor writes."""
    rows = x[plan.token].float().masked_fill(~plan.valid[:, :, None, None], 0.0)
    return rows.transpose(1, 2)


@dataclass(frozen=True)
class _Solved:
    """What is known of each chunk before its initial state S0 is; H value heads, C tokens."""

    u: Tensor  # [M, H, C, V] what the tokens write when S0 = 0
    w: Tensor  # [M, H, C, K] writes are u - w S0^T
    q: Tensor  # [M, H, C, K] queries times the decay since S0
    scores: Tensor  # [M, H, C, C] how token t reads what token s <= t wrote
    k: Tensor  # [M, H, C, K] keys times the decay up to the chunk's end
    decay: Tensor  # [M, H, 1, 1] decay over the whole chunk


def _solve_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Solved:
    """q, k [M, H, C, K], v [M, H, C, V], g and beta [M, H, C], all float32, q already scaled."""
    # One strongly decaying token makes b large; float64 keeps the small differences between its neighbours.
    b = g.clamp(min=_LOG_ZERO).double().cumsum(-1)
    causal = torch.ones(b.shape[-1], b.shape[-1], dtype=torch.bool, device=b.device).tril()
    pair = (b[..., :, None] - b[..., None, :]).masked_fill(~causal, float("-inf")).exp().float()
    since_start = b.exp().float()[..., None]
    until_end = (b[..., -1:] - b).exp().float()[..., None]
    beta = beta[..., None]
    lower = (beta * pair * (k @ k.mT)).tril(-1)
    right = torch.cat([beta * v, beta * since_start * k], dim=-1)
    # unitriangular: the diagonal is taken as ones, so the system is I + lower.
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return _Solved(u, w, q * since_start, pair * (q @ k.mT), k * until_end, b[..., -1:, None].exp().float())


def _scan(chunks: _Solved, plan: _Chunks, state: Tensor) -> Tensor:
    """Carry `state` [N, H, V, K] through the chunks, in place; return the outputs [M, C, H, V]."""
    output = torch.empty_like(chunks.u)
    for running, chunk in plan.steps:
        s = state[running]
        written = chunks.u[chunk] - chunks.w[chunk] @ s.mT
        output[chunk] = chunks.q[chunk] @ s.mT + chunks.scores[chunk] @ written
        state[running] = s * chunks.decay[chunk] + written.mT @ chunks.k[chunk]
    return output.transpose(1, 2)
