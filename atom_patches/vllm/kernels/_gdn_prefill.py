"""vLLM's own GatedDeltaNet prefill: the kernels of `GatedDeltaNetAttention._forward_core`, in its order.

Its copy of the result into the layer's output is left out: here the result is the output. vLLM also writes the states
of padding and of sequences without rows, and leaves the output rows of padding unwritten. What the operator promises
beyond that costs a little more; `timed_gdn_prefill` is the sequence that vLLM runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.fla.ops import fused_post_conv_prep

from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import power_of_two

from . import causal_conv1d as conv
from ._gated_delta_chunk import supports_plan, supports_rule, timed_chunk_gated_delta_rule

__all__ = ["gdn_prefill", "supports_gdn_prefill", "timed_gdn_prefill"]

L2_NORM_EPS = 1e-6
"""Written into vLLM's kernel."""


def supports_gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    if eps != L2_NORM_EPS:
        return no(f"vLLM's kernel adds {L2_NORM_EPS} under the root, not {eps}")
    if a.stride(1) != 1 or b.stride(1) != 1:
        return no("vLLM's kernel wants a and b contiguous in their last dimension")
    if A_log.stride(0) != 1 or dt_bias.stride(0) != 1:
        return no("vLLM's kernel wants A_log and dt_bias contiguous")
    if power_of_two(ssm_state.shape[2]) != power_of_two(ssm_state.shape[3]):
        return no("vLLM's preparation compiles only where values and keys fill up to the same power of two")
    convolves = conv.supports_prefill(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots, has_initial_state, activation, null_slot
    )
    verdicts = (convolves, supports_rule(mixed_qkv.shape[0], ssm_state.shape[3], mixed_qkv), supports_plan(cu_seqlens))
    return next((verdict for verdict in verdicts if not verdict.ok), YES)


def gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    one, null = conv.one_padding_slot(slots, null_slot)
    output, ends = _computed(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, one, has_initial_state, cu_seqlens, A_log,
        dt_bias, scale, activation, null,
    )  # fmt: skip
    real = one != null
    written = real & (cu_seqlens.diff() > 0)
    # Whoever has nothing to write writes the same as the first who has; if nobody has, what is there already.
    source = torch.where(written, torch.arange(len(one), device=one.device), written.int().argmax())
    target = one[source].clamp(min=0).long()
    ssm_state[target] = torch.where(written.any(), ends[source].to(ssm_state.dtype), ssm_state[target])
    return conv.clear_padding(output, cu_seqlens, real)


def timed_gdn_prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    output, ends = _computed(
        mixed_qkv, a, b, conv_weight, conv_bias, conv_state, ssm_state, slots, has_initial_state, cu_seqlens, A_log,
        dt_bias, scale, activation, null_slot,
    )  # fmt: skip
    ssm_state[slots] = ends.to(ssm_state.dtype)
    return output


def _computed(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    activation: str | None,
    null_slot: int | None,
) -> tuple[Tensor, Tensor]:
    """The output and every sequence's state at its end."""
    heads, value_size, key_size = ssm_state.shape[1:]
    convolved = conv.timed_causal_conv1d(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots, has_initial_state, activation, null_slot
    )
    q, k, v, g, beta = fused_post_conv_prep(
        conv_output=convolved,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        num_k_heads=(mixed_qkv.shape[1] - heads * value_size) // (2 * key_size),
        head_k_dim=key_size,
        head_v_dim=value_size,
        apply_l2norm=True,
        output_g_exp=False,
    )
    state = ssm_state[slots].contiguous()
    state[~has_initial_state, ...] = 0
    return timed_chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens, state, scale, 0)
