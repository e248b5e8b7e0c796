"""Mixture of experts: which experts a token takes, and what they compute.

`moe_routing`, T tokens, E experts: logits [T, E], floating, any strides. Scores are their softmax or sigmoid in
float32; a score that is not a number counts as 0. `bias` [E], finite, is added for the choice only. With n_group > 1
the experts are E / n_group neighbours a group, and only those of the best `topk_group` groups can be chosen; a group
is as good as its best score, or with a bias as the sum of its two best biased scores. Of equal ones the lower index
is taken. Results, the best first: weights float32 [T, k], the scores without the bias, divided by their sum (plus
1e-20) if `renormalize`, then times `scaling`; ids int32 [T, k].

`fused_moe`, hidden size H, intermediate size I, E local experts:

    out[t] = sum_j w[t, j] * (silu(x[t] @ gate.T) * (x[t] @ up.T)) @ w2[e].T    gate, up = w13[e, :I], w13[e, I:]

with e = ids[t, j]. x [T, H]; w13 [E, 2I, H]; w2 [E, H, I]; topk_weights float32 and topk_ids int32 or int64 [T, k];
any strides. An id of -1 is padding and adds nothing. `expert_map` int32 [global experts] turns global ids into local
ones, -1 for experts of other ranks, which add nothing here. A shared expert, shared_w13 [2S, H] and shared_w2 [H, S],
takes every token, padding or not, times sigmoid(x[t] @ shared_gate) with shared_gate [H], or 1 without it. S is a
multiple of I. Padded tokens, and ranks without a token, are served. Result [T, H] in x's dtype, contiguous; a token
without an expert gets 0. Sums are in float32; silu(gate) * up is rounded to x's dtype, as the second product's
operand. The result does not depend on timing: no order of additions is left to the hardware.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437), section 2.1.2, for sigmoid scores, the
bias and the groups; N. Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202), for the experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

SCORING = ("softmax", "sigmoid")

#: Largest (relative, absolute) difference from the reference, per dtype of x. The absolute part is for values of the
#: order of 1: sums over the hidden size and over experts cancel.
TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (1.6e-2, 1.6e-2), "float16": (2e-3, 2e-3)}

#: The same for routing weights, whatever the logits' dtype.
ROUTING_TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (1e-5, 1e-6), "float16": (1e-5, 1e-6)}


def _fake_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _routing_class(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> str:  # fmt: skip
    tokens = bucket(logits.shape[0], (1, 16, 64, 256, 4096))
    how = f"{scoring}{'+bias' if bias is not None else ''} g{n_group}"
    return f"{dtype_name(logits.dtype)} {how} E{logits.shape[1]} k{top_k} tokens{tokens}"


def _fake_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _moe_class(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> str:  # fmt: skip
    tokens = bucket(x.shape[0], (1, 16, 64, 256, 1024, 4096))
    extras = ("" if shared_w13 is None else " shared") + ("" if expert_map is None else " mapped")
    sizes = f"E{w13.shape[0]} I{w2.shape[2]} H{x.shape[1]} k{topk_ids.shape[1]}"
    return f"{dtype_name(x.dtype)} {sizes}{extras} tokens{tokens}"


MOE_ROUTING = Operation(
    package=__name__,
    name="moe_routing",
    schema="(Tensor logits, int top_k, str scoring, bool renormalize, Tensor? bias, int n_group, int topk_group, "
    "float scaling) -> (Tensor, Tensor)",
    reference=reference.moe_routing,
    fake=_fake_routing,
    shape_class=_routing_class,
    tolerance=ROUTING_TOLERANCE,
)
FUSED_MOE = Operation(
    package=__name__,
    name="fused_moe",
    schema="(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor? shared_w13, Tensor? shared_w2, Tensor? shared_gate) -> Tensor",
    reference=reference.fused_moe,
    fake=_fake_moe,
    shape_class=_moe_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (MOE_ROUTING, FUSED_MOE)


def moe_routing(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for every token: (weights, ids), both [T, top_k], the best first.

    Raises:
        ValueError: an unknown scoring, a bias of another size, groups that do not divide the experts, or fewer experts
            than are to be chosen.
    """
    experts = logits.shape[1]
    if scoring not in SCORING:
        raise ValueError(f"scoring must be one of {', '.join(SCORING)}, got {scoring!r}")
    if experts % n_group or not 1 <= topk_group <= n_group:
        raise ValueError(f"{topk_group} of {n_group} groups cannot be taken of {experts} experts")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias must be [{experts}], got {list(bias.shape)}")
    if bias is not None and n_group > 1 and experts == n_group:
        raise ValueError("a group of one expert has no two best scores")
    if not 1 <= top_k <= topk_group * (experts // n_group):
        raise ValueError(f"{top_k} experts cannot be chosen among {topk_group * (experts // n_group)}")
    return MOE_ROUTING(logits, top_k, scoring, renormalize, bias, n_group, topk_group, scaling)


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """What the experts of every token make of it, [T, H], weighted and summed, the shared expert's share included.

    Args:
        x: [T, H] hidden states.
        w13: [E, 2I, H] gate rows, then up rows, of the local experts.
        w2: [E, H, I] down projections.
        topk_weights, topk_ids: [T, k], as `moe_routing` returns them; an id of -1 adds nothing.
        expert_map: [global experts] int32: the local index of each expert, -1 where another rank holds it.
        shared_w13, shared_w2: [2S, H] and [H, S] of the expert that takes every token; S is a multiple of I.
        shared_gate: [H]; the shared expert's output is scaled by sigmoid(x @ shared_gate).

    Raises:
        ValueError: shapes that do not belong together.
    """
    experts, width, hidden = w13.shape
    if w2.shape != (experts, hidden, width // 2) or width % 2 or x.shape[1] != hidden:
        raise ValueError(f"w13 {list(w13.shape)}, w2 {list(w2.shape)} and x {list(x.shape)} do not belong together")
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(f"{list(topk_weights.shape)} weights, {list(topk_ids.shape)} ids for {x.shape[0]} tokens")
    if (shared_w13 is None) != (shared_w2 is None) or (shared_gate is not None and shared_w13 is None):
        raise ValueError("a shared expert has shared_w13 and shared_w2, and may have shared_gate")
    if shared_w13 is not None and shared_w2 is not None:
        rows = shared_w13.shape[0]
        if shared_w13.shape[1] != hidden or shared_w2.shape != (hidden, rows // 2) or rows % width or not rows:
            raise ValueError(
                f"a shared expert of {list(shared_w13.shape)} and {list(shared_w2.shape)} beside experts of "
                f"{list(w13.shape[1:])}: its width must be a multiple of theirs"
            )
    return FUSED_MOE(x, w13, w2, topk_weights, topk_ids, expert_map, shared_w13, shared_w2, shared_gate)


__all__ = [
    "FUSED_MOE",
    "MOE_ROUTING",
    "OPERATIONS",
    "ROUTING_TOLERANCE",
    "SCORING",
    "TOLERANCE",
    "fused_moe",
    "moe_routing",
]
