"""vLLM's own routing and experts, as its unquantised method calls them on a GPU without expert parallelism's
communication: routing kernel; alignment, grouped product, activation, grouped product and sum; a shared expert beside
them, on a stream of its own for small batches, as `SharedExperts` does.

A routing score that is not a number is not taken for 0, and one more pass over logits and results would be needed for
it. Padding goes to an expert with the weight 0: what a padded token holds must be finite. Gate and up, silu(gate) and
their product are rounded one after the other, where the operator asks for the last.

Written against vLLM 0.20.2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, sigmoid
from vllm import envs
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import fused_grouped_topk
from vllm.utils.torch_utils import aux_stream

from atom_patches.kernels.registry import YES, Verdict, no


def supports_moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> Verdict:  # fmt: skip
    if n_group > 1:
        if bias is None:
            return no("vLLM chooses experts in groups without a bias in plain torch, and does not order them")
        if n_group > 32 or top_k > 32 or logits.shape[1] == n_group:
            return no(f"vLLM's kernel does not take {top_k} experts in {n_group} groups")
        if logits.dtype != torch.float32:
            return no(f"vLLM's kernel rounds the scores of groups to {logits.dtype}, the dtype of the logits")
    if not logits.shape[0]:
        return no("vLLM's kernels are not launched for zero tokens")
    return YES


def moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits, bias = logits.contiguous(), None if bias is None else bias.float().contiguous()
    if n_group > 1:
        assert bias is not None
        return fused_grouped_topk(logits, logits, top_k, renormalize, bias, n_group, topk_group, scoring, scaling)
    if bias is not None:
        weights, ids = fused_topk_bias(logits, logits, scoring, bias, top_k, renormalize, routed_scaling_factor=scaling)
        return weights, ids
    weights, ids, _ = fused_topk(logits, logits, top_k, renormalize, scoring_func=scoring)
    return weights if scaling == 1.0 else weights * scaling, ids


def supports_fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Verdict:  # fmt: skip
    if x.dtype not in (torch.bfloat16, torch.float16):
        return no(f"vLLM's kernel multiplies {x.dtype} with less precision than this operation states")
    if w2.shape[1] % 64 or w2.shape[2] % 64:
        return no(f"vLLM serves models whose sizes are multiples of 64, not {list(w2.shape[1:])}")
    if w13.stride(2) != 1 or w2.stride(2) != 1:
        return no("vLLM's kernel reads weights whose last dimension is contiguous")
    if topk_ids.dtype != torch.int32 and expert_map is None:
        return no(f"vLLM's kernels take int32 ids here, not {topk_ids.dtype}")
    if not x.shape[0]:
        return no("vLLM's kernels are not launched for zero tokens")
    return YES


def fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    # vLLM's alignment counts by id, and -1 lies outside its tables: padding goes to expert 0, with no weight.
    padding = topk_ids < 0
    topk_weights, topk_ids = topk_weights.masked_fill(padding, 0.0), topk_ids.masked_fill(padding, 0)
    return timed_fused_moe(x, w13, w2, topk_weights, topk_ids, expert_map, shared_w13, shared_w2, shared_gate)


def timed_fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
    experts = w13.shape[0] if expert_map is None else expert_map.numel()
    if shared_w13 is None or shared_w2 is None:
        return fused_experts(x, w13, w2, topk_weights, topk_ids, global_num_experts=experts, expert_map=expert_map)
    stream = aux_stream() if x.shape[0] <= envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD else None
    if stream is None:
        extra = _shared(x, shared_w13, shared_w2, shared_gate)
    else:
        here = torch.cuda.current_stream()
        x.record_stream(stream)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            extra = _shared(x, shared_w13, shared_w2, shared_gate)
        extra.record_stream(here)
    routed = fused_experts(x, w13, w2, topk_weights, topk_ids, global_num_experts=experts, expert_map=expert_map)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return extra + routed


def _shared(x: Tensor, w13: Tensor, w2: Tensor, gate: Tensor | None) -> Tensor:
    """Qwen2MoeMLP's kernels, in its order."""
    both = linear(x, w13)
    act = torch.empty((x.shape[0], w2.shape[1]), dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(act, both)
    out = linear(act, w2)
    return out if gate is None else sigmoid(linear(x, gate[None])) * out
