"""The recurrent gated delta rule in plain torch: a batched step over state slots, and a verified draft."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.slots import is_real

from ._shared import check_shapes


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    scale: float,
    null_slot: int | None,
) -> Tensor:
    """See `recurrent`."""
    check_step(q, k, v, g, beta, state, slots)
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    real = is_real(slots, null_slot)
    slot = slots[real].long()
    after, read = _advance(state[slot], q[real], k[real], v[real], g[real], beta[real], scale)
    state[slot] = after.to(state.dtype)
    output[real] = read.to(v.dtype)
    return output


def verify_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    scale: float,
    null_slot: int | None,
) -> Tensor:
    """See `recurrent`; everything that says where something lies is read on the host."""
    check_draft(q, k, v, g, beta, cu_seqlens, state, slots, num_accepted)
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    bounds, real = cu_seqlens.tolist(), is_real(slots, null_slot).tolist()
    for i, (places, accepted) in enumerate(zip(slots.tolist(), num_accepted.tolist(), strict=True)):
        first, last = bounds[i], bounds[i + 1]
        if last == first or not real[i][accepted - 1]:
            continue
        s = state[places[accepted - 1]][None].float()
        for j, t in enumerate(range(first, last)):
            one = slice(t, t + 1)
            s, read = _advance(s, q[one], k[one], v[one], g[one], beta[one], scale)
            output[one] = read.to(v.dtype)
            if real[i][j]:
                state[places[j]] = s[0].to(state.dtype)
    return output


def check_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> int:
    """Raise ValueError for shapes that contradict the schema; return how many value heads one key head serves."""
    heads_per_key = check_shapes(q, k, v, g, beta)
    if tuple(slots.shape) != (q.shape[0],):
        raise ValueError(f"slots has shape {tuple(slots.shape)}, expected ({q.shape[0]},): one state per row")
    _check_pool(k, v, state)
    return heads_per_key


def check_draft(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
) -> int:
    """As `check_step`, for drafts."""
    heads_per_key = check_shapes(q, k, v, g, beta)
    seqs = slots.shape[0] if slots.dim() == 2 and slots.shape[1] else -1
    if seqs < 0 or tuple(cu_seqlens.shape) != (seqs + 1,) or tuple(num_accepted.shape) != (seqs,):
        raise ValueError(
            "slots must be [N, n], cu_seqlens [N + 1] and num_accepted [N], got "
            f"{tuple(slots.shape)}, {tuple(cu_seqlens.shape)} and {tuple(num_accepted.shape)}"
        )
    _check_pool(k, v, state)
    return heads_per_key


def _check_pool(k: Tensor, v: Tensor, state: Tensor) -> None:
    if tuple(state.shape[1:]) != (v.shape[1], v.shape[2], k.shape[2]):
        raise ValueError(
            f"state has shape {tuple(state.shape)}, expected [S, {v.shape[1]}, {v.shape[2]}, {k.shape[2]}]"
        )


def _advance(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences from state [N, HV, V, K]: the new states and what is read, float32."""
    heads_per_key = v.shape[1] // q.shape[1]
    q_ = q.float().repeat_interleave(heads_per_key, dim=1) * scale
    k_ = k.float().repeat_interleave(heads_per_key, dim=1)
    s = state.float() * g.float().exp()[..., None, None]
    error = v.float() - torch.einsum("thvk,thk->thv", s, k_)
    s = s + torch.einsum("thv,thk->thvk", error * beta.float()[..., None], k_)
    return s, torch.einsum("thvk,thk->thv", s, q_)


__all__ = ["recurrent_gated_delta_rule", "verify_gated_delta_rule"]
