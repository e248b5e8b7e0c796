"""SGLang's routing and experts, as its unquantised Triton runner calls them, and Qwen3.5's shared expert beside them:
on a stream of its own in small batches, which SGLang captures.

A routing score that is not a number is not taken for 0, and of two equal scores that are the best of a group the router
counts one: both would need a pass of their own. Padding ids, -1, have a place of their own in SGLang's alignment.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools

import torch
from sgl_kernel import silu_and_mul
from sglang.kernels.ops.elementwise.elementwise import fused_gate_sigmoid_mul_add
from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl
from torch import Tensor
from torch.nn.functional import linear

from atom_patches.kernels.registry import YES, Verdict, no

from ._process import available

LARGEST_CAPTURED = 256
"""Tokens of the largest batch that is taken to run in a CUDA graph of SGLang's."""

SORTED_BY_ID = (896, 16)
"""Experts, and how many of them a token takes, for which SGLang has a router of its own."""


def supports_moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> Verdict:  # fmt: skip
    if not logits.shape[0]:
        return no("SGLang's kernels are not launched for zero tokens")
    if scaling != 1.0 and not renormalize:
        return no("SGLang scales weights that are divided by their sum only")
    if n_group > 1 and bias is None:
        return no("SGLang rates a group by its two best scores, also without a bias")
    if scoring == "sigmoid" and n_group == 1 and (logits.shape[1], top_k) == SORTED_BY_ID:
        return no("SGLang's router for so many experts returns them in the order of their ids")
    if scoring == "softmax" and (n_group > 1 or bias is not None):
        return no("SGLang's router takes softmax scores without a bias or groups only")
    return YES


def moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if bias is None:
        bias = torch.zeros(logits.shape[1], dtype=torch.float32, device=logits.device)
    return moe_fused_gate(
        logits.contiguous(),
        bias.float().contiguous(),
        top_k,
        scoring_func=scoring,
        renormalize=renormalize,
        routed_scaling_factor=scaling,
        apply_routed_scaling_factor_on_output=scaling != 1.0,
        num_expert_group=n_group,
        topk_group=topk_group,
    )


def supports_fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Verdict:  # fmt: skip
    if not x.shape[0]:
        return no("SGLang's kernels are not launched for zero tokens")
    if not w13.is_contiguous() or not w2.is_contiguous():
        return no("SGLang's kernel reads contiguous weights")
    if x.element_size() != 2:
        return no(f"SGLang's kernel computes in half precision only, not {x.dtype}")
    if topk_ids.dtype != torch.int32:
        return no(f"SGLang's kernels take int32 ids, not {topk_ids.dtype}")
    return YES


def fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    if expert_map is not None:
        topk_ids = torch.where(topk_ids < 0, -1, expert_map[topk_ids.clamp(min=0)])
    return _experts(x, w13, w2, topk_weights, topk_ids, shared_w13, shared_w2, shared_gate, some_absent=True)


def timed_fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """What SGLang itself runs: ids are local when they get here, and without a map none is absent."""
    absent = expert_map is not None
    return _experts(x, w13, w2, topk_weights, topk_ids, shared_w13, shared_w2, shared_gate, some_absent=absent)


def _experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_w13: Tensor | None,
    shared_w2: Tensor | None, shared_gate: Tensor | None, *, some_absent: bool,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    # SGLang allocates the result from a pool of its tensor-parallel group, of which there may be none here.
    routed = functools.partial(
        fused_experts_impl, x.clone(), w13, w2, topk_weights.contiguous(), topk_ids.contiguous(), inplace=True,
        filter_expert=some_absent,
    )  # fmt: skip
    if shared_w13 is None or shared_w2 is None:
        return routed()
    if x.shape[0] <= LARGEST_CAPTURED:
        here, stream = torch.cuda.current_stream(), _stream(x.device)
        stream.wait_stream(here)
        shared = _shared(x, shared_w13, shared_w2)
        with torch.cuda.stream(stream):
            out = routed()
        here.wait_stream(stream)
        out.record_stream(here)
    else:
        shared, out = _shared(x, shared_w13, shared_w2), routed()
    if shared_gate is None:
        return out.add_(shared)
    fused_gate_sigmoid_mul_add(x, shared_gate.contiguous(), shared, out)
    return out


def _shared(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return linear(silu_and_mul(linear(x, w13)), w2)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


__all__ = [
    "available",
    "fused_moe",
    "moe_routing",
    "supports_fused_moe",
    "supports_moe_routing",
    "timed_fused_moe",
]
