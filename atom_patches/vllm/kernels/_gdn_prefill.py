"""vLLM's own GatedDeltaNet prefill: the kernels of `GatedDeltaNetAttention._forward_core`, in its order.

Its copy of the result into the layer's output is left out: here the result is the output.
"""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.fla.ops import fused_post_conv_prep

from atom_patches.kernels.registry import Verdict, no

from ._gated_delta_chunk import chunk_gated_delta_rule, supports_rule
from .causal_conv1d import causal_conv1d, supports_causal_conv1d

__all__ = ["gdn_prefill", "supports_gdn_prefill"]

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
    convolves = supports_causal_conv1d(
        mixed_qkv, conv_weight, conv_bias, cu_seqlens, conv_state, slots, has_initial_state, activation, null_slot
    )
    return supports_rule(mixed_qkv.shape[0], ssm_state.shape[3], mixed_qkv) if convolves.ok else convolves


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
    heads, value_size, key_size = ssm_state.shape[1:]
    convolved = causal_conv1d(
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
    output, state = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens, state, scale, 0)
    ssm_state[slots] = state.to(ssm_state.dtype)
    return output
