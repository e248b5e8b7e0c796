"""Mixture of experts by AITER; never run on AMD hardware.

AITER's kernels read the experts' weights in a layout of their own (`shuffle_weight`, tiles of 16 x 16 bytes), which the
engines give them once, in place of the weights. Our operator's weights are plain, whoever serves it; so the binding
makes a second set, as large as the first, when a weight is first used, and keeps it as long as that weight lives. That
memory is the caller's to give: nothing is served until `keep_copies(True)`. Call it before the engine measures its
memory, and run the model once, so that the copies are made outside of a graph capture.

Not bound: maps of experts (AITER's mask cannot tell in which order a rank holds its experts), and routing by sigmoid,
bias or groups (AITER does not say in which order it gives the chosen). A padded id becomes expert 0 with weight 0. The
shared expert is two matrix products of torch's.

Called as in vLLM's `vllm/_aiter_ops.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.weak import WeakIdKeyDictionary

from atom_patches.kernels.aiter_binding import Function, first
from atom_patches.kernels.registry import Verdict, no

ROUTE = Function(
    "aiter.ops.moe_op:topk_softmax",
    ("topk_weights", "topk_indices", "token_expert_indices", "gating_output", "need_renorm"),
    call_site="vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_topk_softmax_impl",
)
EXPERTS = Function(
    "aiter.fused_moe:fused_moe",
    ("hidden_states", "w1", "w2", "topk_weight", "topk_ids"),
    call_site="vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_fused_moe_impl",
)
SHUFFLE = Function(
    "aiter.ops.shuffle:shuffle_weight",
    ("x",),
    ("layout",),
    call_site="vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: shuffle_weights",
)
LAYOUT = (16, 16)

_keep_copies = False
#: Weight -> (its version, its shuffled copy); the version is None of an inference tensor, which has none.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def keep_copies(allowed: bool) -> None:
    """Allow, or forbid and forget, second copies of the experts' weights in AITER's layout."""
    global _keep_copies
    _keep_copies = allowed
    if not allowed:
        _copies.clear()


def supports_moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> Verdict:  # fmt: skip
    if scoring != "softmax" or bias is not None or n_group > 1:
        return no("AITER's routing by sigmoid, bias or groups does not say in which order it gives the chosen")
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"AITER routes by logits of bfloat16, float16 or float32, not {logits.dtype}")
    return ROUTE.verdict()


def moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = torch.empty(logits.shape[0], top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32, device=logits.device)
    if not weights.numel():
        return weights, ids
    # Of a row without a softmax AITER would choose experts that are not there.
    odd = ~logits.float().logsumexp(-1, keepdim=True).isfinite()
    ROUTE(weights, ids, torch.empty_like(ids), logits.masked_fill(odd, 0.0).contiguous(), renormalize)
    return weights.masked_fill_(odd, 0.0).mul_(scaling), ids


def supports_fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Verdict:  # fmt: skip
    if not _keep_copies:
        return no(
            "AITER needs the experts' weights in its own layout; keep_copies(True) of fused_moe.aiter_impl allows a "
            "second copy of them"
        )
    if expert_map is not None:
        return no("AITER's mask of experts cannot say in which order a rank holds them")
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.dtype == w13.dtype == w2.dtype:
        return no(f"bound for one dtype of 16 bits, not {x.dtype} with weights of {w13.dtype} and {w2.dtype}")
    if w13.shape[1] % 16 or w13.shape[2] % 32 or w2.shape[1] % 16 or w2.shape[2] % 32:
        return no(f"AITER's layout has tiles of 16 x 32: {list(w13.shape)} and {list(w2.shape)} are not made of them")
    return first(SHUFFLE.verdict(), EXPERTS.verdict())


def fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    if not x.shape[0]:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    padding = topk_ids < 0
    out = EXPERTS(
        x.contiguous(),
        _shuffled(w13),
        _shuffled(w2),
        topk_weights.masked_fill(padding, 0.0).float().contiguous(),
        topk_ids.masked_fill(padding, 0).to(torch.int32).contiguous(),
    )
    if shared_w13 is None or shared_w2 is None:
        return out
    gate, up = linear(x, shared_w13).chunk(2, dim=-1)
    shared = linear(silu(gate.float()).mul_(up).to(x.dtype), shared_w2)
    if shared_gate is not None:
        shared = shared * linear(x.float(), shared_gate[None].float()).sigmoid_()
    return (out + shared).to(x.dtype)


def _shuffled(weight: Tensor) -> Tensor:
    """The copy of a weight in AITER's layout; made anew after the weight was written to."""
    version = None if weight.is_inference() else weight._version
    known = _copies.get(weight)
    if known is None or known[0] != version:
        known = (version, SHUFFLE(weight.detach().contiguous(), layout=LAYOUT))
        _copies[weight] = known
    return known[1]
