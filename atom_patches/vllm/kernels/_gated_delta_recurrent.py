"""vLLM's own recurrent gated delta rule, as its GatedDeltaNet layers call it.

vLLM leaves the output rows of padding unwritten, and slot 0 and every negative slot are padding to it. What the
operators promise beyond that costs a little more; the `timed_` functions are the calls that vLLM makes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fla.ops import fused_recurrent_gated_delta_rule

from atom_patches.kernels.gated_delta_rule.recurrent_reference import check_draft, check_step
from atom_patches.kernels.registry import YES, Verdict, no

from .causal_conv1d import clear_padding


def supports_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    scale: float,
    null_slot: int | None,
) -> Verdict:
    check_step(q, k, v, g, beta, state, slots)
    rows = _supports_rows(q, v, scale)
    return supports_states(v, state, slots, null_slot) if rows.ok else rows


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
    y = timed_recurrent_gated_delta_rule(q, k, v, g, beta, state, slots, scale, null_slot)
    return y.masked_fill_((slots <= 0)[:, None, None], 0).to(v.dtype)


def timed_recurrent_gated_delta_rule(
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
    y, _ = fused_recurrent_gated_delta_rule(
        q[:, None],
        k[:, None],
        v[:, None],
        g[:, None],
        beta[:, None],
        scale=scale,
        initial_state=state,
        inplace_final_state=True,
        ssm_state_indices=slots,
    )
    return y[:, 0]


def supports_verify_gated_delta_rule(
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
) -> Verdict:
    check_draft(q, k, v, g, beta, cu_seqlens, state, slots, num_accepted)
    if slots.stride(1) != 1 or cu_seqlens.stride(0) != 1 or num_accepted.stride(0) != 1:
        return no("vLLM's kernel wants contiguous slots, cu_seqlens and num_accepted")
    rows = _supports_rows(q, v, scale)
    return supports_states(v, state, slots, null_slot) if rows.ok else rows


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
    start = slots.gather(1, num_accepted.long()[:, None] - 1)[:, 0]
    y = timed_verify_gated_delta_rule(q, k, v, g, beta, cu_seqlens, state, slots, num_accepted, scale, null_slot)
    return clear_padding(y, cu_seqlens, start > 0).to(v.dtype)


def timed_verify_gated_delta_rule(
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
    y, _ = fused_recurrent_gated_delta_rule(
        q[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        scale=scale,
        initial_state=state,
        inplace_final_state=True,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=slots,
        num_accepted_tokens=num_accepted,
    )
    return y[0]


def _supports_rows(q: Tensor, v: Tensor, scale: float) -> Verdict:
    if q.dtype != v.dtype:
        return no(f"vLLM's kernel rounds its output to {q.dtype}, the dtype of q, not to that of v")
    return YES if scale > 0 else no(f"vLLM's kernel takes positive scales, not {scale}")


def supports_states(v: Tensor, state: Tensor, slots: Tensor, *null_slot: Any) -> Verdict:
    """What every recurrent kernel of vLLM's wants of its states."""
    if not v.shape[0] or not slots.shape[0]:
        return no("vLLM's kernel is not launched without rows")
    if null_slot != (0,):
        return no(f"slot 0 is padding to vLLM's kernel, not {null_slot[0]}")
    if state.stride()[1:] != (state.shape[2] * state.shape[3], state.shape[3], 1):
        return no("vLLM's kernel wants each slot's states contiguous, the keys innermost")
    return YES


__all__ = [
    "recurrent_gated_delta_rule",
    "supports_recurrent_gated_delta_rule",
    "supports_verify_gated_delta_rule",
    "timed_recurrent_gated_delta_rule",
    "timed_verify_gated_delta_rule",
    "verify_gated_delta_rule",
]
