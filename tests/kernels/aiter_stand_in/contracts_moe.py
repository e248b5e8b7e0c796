"""Contracts of AITER's mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from .checks import FLOAT16, FLOATS, Arguments, contract

MOE = "ROCm/aiter 000621842c17 aiter/fused_moe.py: fused_moe, fused_moe_"
VLLM = "vllm-project/vllm v0.20.2"
TOPK = "amd-aiter 0.1.7.post2.dev18 csrc/kernels/topk_softmax_kernels.cu: topk_softmax"
SHUFFLE = "ROCm/aiter 0122c48149c1 aiter/ops/shuffle.py: shuffle_weight"


@contract(
    "aiter.ops.moe_op:topk_softmax",
    "topk_weights topk_indices token_expert_indices gating_output need_renorm",
    TOPK,
    f"{VLLM} vllm/_aiter_ops.py: _rocm_aiter_topk_softmax_impl",
)
def topk_softmax(a: Arguments) -> None:
    """Rows are addressed by their length; the best comes first, of equal ones the lower index."""
    logits = a.tensor("gating_output", shape=(None, None), dtype=FLOATS, layout="contiguous", align=16)
    tokens, experts = logits.shape
    a.require(tokens > 0, "no rows: an empty grid is launched")
    weights = a.tensor("topk_weights", shape=(tokens, None), dtype=torch.float32, layout="contiguous")
    same = {"shape": tuple(weights.shape), "dtype": torch.int32, "layout": "contiguous"}
    ids, _ = (a.tensor(name, **same) for name in ("topk_indices", "token_expert_indices"))
    a.require(a.get("topk_indices").data_ptr() != a.get("token_expert_indices").data_ptr(), "the ids are overwritten")
    a.require(bool(logits.float().logsumexp(-1).isfinite().all()), "a row has no softmax: its ids are anything")
    a.require(weights.shape[1] <= experts, "more experts than there are")
    scores = logits.float().softmax(-1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : weights.shape[1]]
    chosen = scores.gather(1, order)
    weights.copy_(chosen / chosen.sum(-1, keepdim=True) if a.flag("need_renorm") else chosen)
    ids.copy_(order)


@contract("aiter.ops.shuffle:shuffle_weight", "x layout", SHUFFLE, f"{VLLM} vllm/_aiter_ops.py: shuffle_weights")
def shuffle_weight(a: Arguments) -> Tensor:
    """Tiles of 16 rows and 32 columns (of 16 bits), with 8 columns of a row together; marked by an attribute."""
    x = a.tensor("x", shape=(None, None, None), dtype=FLOAT16, layout="contiguous")
    a.require(a.get("layout") == (16, 16), "another layout than (16, 16)")
    a.require(x.shape[1] % 16 == 0 and x.shape[2] % 32 == 0, f"{tuple(x.shape)} is not made of tiles of 16 and 32")
    shuffled = x.reshape(-1)[_places(*x.shape)].view(x.shape)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    return shuffled


@contract(
    "aiter.fused_moe:fused_moe",
    "hidden_states w1 w2 topk_weight topk_ids",
    MOE,
    f"{VLLM} vllm/_aiter_ops.py: _rocm_aiter_fused_moe_impl",
    f"{VLLM} vllm/model_executor/layers/fused_moe/rocm_aiter_fused_moe.py: rocm_aiter_fused_experts",
    f"{VLLM} vllm/model_executor/layers/fused_moe/oracle/unquantized.py: weights are shuffled",
)
def fused_moe(a: Arguments) -> Tensor:
    """Shuffled weights, gate rows before up rows; every id names an expert; float32 weights and int32 ids."""
    x = a.tensor("hidden_states", shape=(None, None), dtype=FLOAT16, layout="contiguous")
    tokens, hidden = x.shape
    a.require(tokens > 0, "no rows: an empty grid is launched")
    w1 = a.tensor("w1", shape=(None, None, hidden), dtype=x.dtype, layout="contiguous")
    experts, width, _ = w1.shape
    w2 = a.tensor("w2", shape=(experts, hidden, width // 2), dtype=x.dtype, layout="contiguous")
    for name, weight in (("w1", w1), ("w2", w2)):
        a.require(getattr(weight, "is_shuffled", False), f"{name} is not shuffled")
    weights = a.tensor("topk_weight", shape=(tokens, None), dtype=torch.float32, layout="contiguous")
    ids = a.tensor("topk_ids", shape=tuple(weights.shape), dtype=torch.int32, layout="contiguous")
    a.require(bool(((ids >= 0) & (ids < experts)).all()), "topk_ids names an expert that is not there")
    w1, w2 = (_plain(w) for w in (w1, w2))
    out = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (x[token].float() @ w1[expert].float().T).chunk(2)
            inner = (silu(gate) * up).to(x.dtype).float()
            out[token] += weight * (inner @ w2[expert].float().T)
    return out.to(x.dtype)


def _plain(shuffled: Tensor) -> Tensor:
    plain = torch.empty_like(shuffled).view(-1)
    return plain.scatter_(0, _places(*shuffled.shape), shuffled.reshape(-1)).view(shuffled.shape)


def _places(experts: int, rows: int, columns: int) -> Tensor:
    """For every place of a shuffled weight [experts, rows, columns], in order, where its value lay before."""
    at = torch.arange(experts * rows * columns)
    inner, lane = at % 8, at // 8 % 16  # eight neighbouring columns; the row of a tile
    quarter = at // (8 * 16) % 4  # which eight columns of the tile's 32
    tile = at // (16 * 32)
    across = tile % (columns // 32)
    down = tile // (columns // 32)  # tiles of 16 rows, through all experts
    return (down * 16 + lane) * columns + across * 32 + quarter * 8 + inner
