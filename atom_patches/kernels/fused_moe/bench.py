"""Routing and experts at the shape of Qwen3.6-35B-A3B (256 experts of 512, top 8, one gated shared expert), and
DeepSeek-V3's routing. How many experts a batch reaches decides a decode step's bytes, so the label has it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import FUSED_MOE, MOE_ROUTING

EXPERTS, WIDTH, HIDDEN, TOP_K = 256, 512, 2048, 8
BF16 = 2


@functools.cache
def routing(tokens: int, experts: int = EXPERTS, top_k: int = TOP_K, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and ids of `tokens` tokens whose logits are normal, on the CPU."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    best = logits.softmax(-1).topk(top_k, -1)
    return best.values / best.values.sum(-1, keepdim=True), best.indices.int()


def weights(
    device: torch.device,
    experts: int = EXPERTS,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """w13 and w2 of variance 1 / fan-in, from a fixed seed."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    w13 = torch.empty(experts, 2 * width, hidden, device=device, dtype=dtype)
    w2 = torch.empty(experts, hidden, width, device=device, dtype=dtype)
    return w13.normal_(0, hidden**-0.5, generator=generator), w2.normal_(0, width**-0.5, generator=generator)


def _moe(tokens: int, shared: bool) -> Case:
    _, chosen = routing(tokens)
    distinct = chosen.unique().numel()

    def inputs(device: torch.device) -> tuple[Any, ...]:
        w13, w2 = weights(device)
        x = torch.empty(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        if device.type != "meta":
            x.normal_(generator=torch.Generator(device).manual_seed(1))
        topk_weights, topk_ids = (part.to(device) for part in routing(tokens))
        if not shared:
            return x, w13, w2, topk_weights, topk_ids, None, None, None, None
        one = w13[0].clone(), w2[0].clone(), torch.full((HIDDEN,), 0.01, device=device, dtype=torch.bfloat16)
        return x, w13, w2, topk_weights, topk_ids, None, *one

    used = distinct + (1 if shared else 0)
    pairs = tokens * (TOP_K + (1 if shared else 0))
    extra = " + gated shared" if shared else ""
    return Case(
        FUSED_MOE,
        f"{tokens} tokens, {distinct} of {EXPERTS} experts{extra}, bf16",
        inputs,
        bytes=used * 3 * WIDTH * HIDDEN * BF16 + 2 * tokens * HIDDEN * BF16 + tokens * TOP_K * 8,
        flops=pairs * 6 * WIDTH * HIDDEN,
    )


def _route(tokens: int, deepseek: bool) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        dtype = torch.float32 if deepseek else torch.bfloat16
        if device.type == "meta":
            logits = torch.empty(tokens, EXPERTS, device=device, dtype=dtype)
        else:  # every row has the same values, well apart: implementations round the scores differently
            place = torch.rand(
                tokens, EXPERTS, device=device, generator=torch.Generator(device).manual_seed(2)
            ).argsort(-1)
            logits = torch.linspace(-3, 3, EXPERTS, device=device)[place].to(dtype)
        if not deepseek:
            return logits, TOP_K, "softmax", True, None, 1, 1, 1.0
        return logits, TOP_K, "sigmoid", True, torch.zeros(EXPERTS, device=device), 8, 4, 2.5

    kind = "sigmoid, bias, 4 of 8 groups, fp32" if deepseek else "softmax, bf16"
    size = tokens * EXPERTS * (4 if deepseek else BF16) + tokens * TOP_K * 8
    label = f"{tokens} tokens, {TOP_K} of {EXPERTS}, {kind}"
    return Case(MOE_ROUTING, label, inputs, bytes=size, flops=5 * tokens * EXPERTS)


CASES = (
    *(_moe(tokens, shared) for shared in (False, True) for tokens in (1, 16, 64, 4096, 16384)),
    *(_route(tokens, deepseek) for deepseek in (False, True) for tokens in (1, 16, 64, 4096, 16384)),
)
