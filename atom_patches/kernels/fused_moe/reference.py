"""Routing and experts in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the package's schema."""
    tokens, experts = logits.shape
    wide = logits.float()
    scores = (wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()).nan_to_num(nan=0.0)
    choice = scores if bias is None else scores + bias.float()
    if n_group > 1:
        groups = choice.view(tokens, n_group, experts // n_group)
        best = groups.amax(-1) if bias is None else groups.topk(2, -1).values.sum(-1)
        taken = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, topk_group), True)
        choice = groups.masked_fill(~taken.unsqueeze(-1), float("-inf")).view(tokens, experts)
    ids = _best(choice, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids.int()


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row, the largest first, of equal ones the lower index first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """See the package's schema."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids < 0, ids, expert_map.long()[ids.clamp(min=0)])
    for expert in range(w13.shape[0]):
        token, place = torch.where(ids == expert)
        rows = _expert(x[token], w13[expert], w2[expert])
        total.index_add_(0, token, rows * topk_weights[token, place].float().unsqueeze(-1))
    if shared_w13 is not None and shared_w2 is not None:
        rows = _expert(x, shared_w13, shared_w2)
        if shared_gate is not None:
            rows = rows * (x.float() @ shared_gate.float()).sigmoid().unsqueeze(-1)
        total += rows
    return total.to(x.dtype)


def _expert(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """One expert's output, float32, for the tokens x."""
    gate, up = (x.float() @ w13.float().T).chunk(2, -1)
    return (silu(gate) * up).to(x.dtype).float() @ w2.float().T
