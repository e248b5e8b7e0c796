"""The recurrent gated delta rule in plain torch: one batched step over state slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ._shared import check_shapes, default_scale


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    slots: Tensor,
    scale: float | None = None,
    null_slot: int | None = 0,
) -> Tensor:
    """Advance one token per row against a pool of states, which is updated in place.

    Args:
        q, k, v, g, beta: as in the package's schema, with T = number of rows.
        state: [S, HV, V, K], any strides and floating dtype.
        slots: [T] integers, the state of each row. Negative entries and `null_slot` are padding: their
            output is 0 and no state is touched. The others must be distinct.
        scale: factor of the output; None means K ** -0.5.
        null_slot: slot that stands for "none"; None when every non-negative slot is real.

    Returns:
        output [T, HV, V] in v's dtype.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    heads_per_key = check_shapes(q, k, v, g, beta)
    if tuple(slots.shape) != (q.shape[0],):
        raise ValueError(f"slots has shape {tuple(slots.shape)}, expected ({q.shape[0]},): one state per row")
    if tuple(state.shape[1:]) != (v.shape[1], v.shape[2], k.shape[2]):
        raise ValueError(
            f"state has shape {tuple(state.shape)}, expected [S, {v.shape[1]}, {v.shape[2]}, {k.shape[2]}]"
        )
    factor = default_scale(k) if scale is None else scale
    real = slots >= 0 if null_slot is None else (slots >= 0) & (slots != null_slot)
    slot = slots[real].long()
    q_ = q[real].float().repeat_interleave(heads_per_key, dim=1) * factor
    k_ = k[real].float().repeat_interleave(heads_per_key, dim=1)
    s = state[slot].float() * g[real].float().exp()[..., None, None]
    error = v[real].float() - torch.einsum("thvk,thk->thv", s, k_)
    s += torch.einsum("thv,thk->thvk", error * beta[real].float()[..., None], k_)
    state[slot] = s.to(state.dtype)
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    output[real] = torch.einsum("thvk,thk->thv", s, q_).to(v.dtype)
    return output
