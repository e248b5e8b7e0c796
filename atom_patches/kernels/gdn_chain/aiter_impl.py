"""A GatedDeltaNet layer's decode step by AITER's Triton kernels; never run on AMD hardware.

Two calls: the convolution (see `causal_conv1d.aiter_impl`), whose result is rounded to the activations' dtype, and
`fused_rearrange_sigmoid_gated_delta_rule`, which splits, norms with an epsilon of 1e-6, gates and steps. Of the pool of
states it reads the distance of two slots only, and for a negative index it writes nothing; those rows are zeroed here.

Prefill is not bound: AITER has no function for the chain, and its parts are bound one by one.

Called as in AITER's `aiter/ops/triton/gated_delta_net/fused_rearrange_sigmoid_gdr.py`; function and commit are in
`call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function, first
from atom_patches.kernels.causal_conv1d import aiter_impl as convolution
from atom_patches.kernels.registry import Verdict, no
from atom_patches.kernels.slots import is_real

STEP = Function(
    "aiter.ops.triton.gated_delta_net.fused_rearrange_sigmoid_gdr:fused_rearrange_sigmoid_gated_delta_rule",
    ("A_log", "a", "b", "dt_bias", "qkv", "key_dim", "value_dim", "head_k_dim", "head_v_dim"),
    (
        "scale",
        "initial_state",
        "inplace_final_state",
        "cu_seqlens",
        "ssm_state_indices",
        "use_qk_l2norm_in_kernel",
        "core_attn_out",
    ),
    call_site="ROCm/aiter 162e47ef9ebb aiter/ops/triton/gated_delta_net/fused_rearrange_sigmoid_gdr.py: "
    "fused_rearrange_sigmoid_gated_delta_rule",
)
EPSILON = 1e-6


def supports_gdn_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    if eps != EPSILON:
        return no(f"AITER's l2 norm has an epsilon of {EPSILON}, not {eps}")
    if not scale > 0:
        return no(f"AITER's scale is positive, not {scale}")
    if not mixed_qkv.dtype == a.dtype == b.dtype:
        return no(f"bound for projections of one dtype, not {mixed_qkv.dtype}, {a.dtype} and {b.dtype}")
    floats = (torch.bfloat16, torch.float16, torch.float32)
    if A_log.dtype != torch.float32 or dt_bias.dtype not in floats or ssm_state.dtype not in floats:
        return no(f"AITER's call sites have A_log in float32, not {A_log.dtype}, and states of 16 or 32 bits")
    if not ssm_state[:1].is_contiguous():
        return no("a slot of AITER's pool of states is dense, [HV, V, K]")
    conv = convolution.supports_causal_conv1d_update(
        mixed_qkv, conv_weight, conv_bias, conv_state, slots, activation, null_slot
    )
    return first(conv, STEP.verdict())


def gdn_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    eps: float,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    heads, width, size = ssm_state.shape[1:]
    rows = mixed_qkv.shape[0]
    out = torch.empty(rows, heads, width, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    if not rows:
        return out
    padding = ~is_real(slots, null_slot)
    STEP(
        A_log.contiguous(),
        a,
        b,
        dt_bias.contiguous(),
        convolution.causal_conv1d_update(mixed_qkv, conv_weight, conv_bias, conv_state, slots, activation, null_slot),
        (mixed_qkv.shape[1] - heads * width) // 2,
        heads * width,
        size,
        width,
        scale=scale,
        initial_state=ssm_state,
        inplace_final_state=True,
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=mixed_qkv.device),
        ssm_state_indices=slots.masked_fill(padding, convolution.PAD).to(torch.int32).contiguous(),
        use_qk_l2norm_in_kernel=True,
        core_attn_out=out.view(-1),
    )
    return out.masked_fill_(padding[:, None, None], 0.0)
