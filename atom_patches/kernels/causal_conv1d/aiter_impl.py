"""Causal convolution by AITER's Triton kernels; never run on AMD hardware.

Prefill and the one-token update only: drafts of different lengths and a given halo have no counterpart there.

Both kernels know one mark of padding, `pad_slot_id`. It must be negative: the prefill kernel leaves out the sequence
whose *index* it is as well. So every slot that stands for padding here becomes -1 first. They leave unwritten what
belongs to padding or to no sequence, which is zeroed here, and the update overwrites its input, which is copied.
`seq_lens_cpu` only sizes the prefill's grid; the number of tokens bounds every length, and asks no device for them.

Called as in AITER's `op_tests/triton_tests/conv/test_causal_conv1d.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no
from atom_patches.kernels.slots import is_real

PREFILL = Function(
    "aiter.ops.triton.conv.causal_conv1d:causal_conv1d_fn",
    ("x", "weight", "bias", "conv_states", "query_start_loc", "seq_lens_cpu"),
    ("cache_indices", "has_initial_state", "activation", "pad_slot_id"),
    call_site="ROCm/aiter 464dd844bcb1 op_tests/triton_tests/conv/test_causal_conv1d.py: test_causal_conv1d_varlen",
)
UPDATE = Function(
    "aiter.ops.triton.conv.causal_conv1d:causal_conv1d_update",
    ("x", "conv_state", "weight", "bias"),
    ("activation", "conv_state_indices", "pad_slot_id"),
    call_site="ROCm/aiter 464dd844bcb1 op_tests/triton_tests/conv/test_causal_conv1d.py: "
    "test_causal_conv1d_update_with_batch_gather",
)
PAD = -1


def supports_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    return _refusal(x, weight, bias, state) or PREFILL.verdict()


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    tokens, sequences = x.shape[0], slots.shape[0]
    if not tokens or not sequences:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    padding = ~is_real(slots, null_slot)
    y = PREFILL(
        x.contiguous().T,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        state,
        cu_seqlens.to(torch.int32).contiguous(),
        [tokens] * sequences,
        cache_indices=slots.masked_fill(padding, PAD).to(torch.int32).contiguous(),
        has_initial_state=None if has_initial_state is None else has_initial_state.to(torch.bool).contiguous(),
        activation=activation,
        pad_slot_id=PAD,
    ).T
    row = torch.arange(tokens, device=x.device)
    owner = torch.searchsorted(cu_seqlens.contiguous(), row.to(cu_seqlens.dtype), right=True) - 1
    idle = (owner < 0) | (owner >= sequences) | padding[owner.clamp(0, sequences - 1)]
    return y.masked_fill(idle[:, None], 0.0).contiguous()


def supports_causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    return _refusal(x, weight, bias, state) or UPDATE.verdict()


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    if not y.numel():
        return y
    padding = ~is_real(slots, null_slot)
    UPDATE(
        y,
        state,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        activation=activation,
        conv_state_indices=slots.masked_fill(padding, PAD).to(torch.int32).contiguous(),
        pad_slot_id=PAD,
    )
    return y.masked_fill_(padding[:, None], 0.0)


def _refusal(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Verdict | None:
    if not 2 <= weight.shape[1] <= 4:
        return no(f"AITER convolves with 2, 3 or 4 taps, not {weight.shape[1]}")
    dtypes = {x.dtype, weight.dtype, state.dtype} | ({bias.dtype} if bias is not None else set())
    if len(dtypes) > 1 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"AITER's call sites have one dtype of 16 or 32 bits throughout, not {sorted(map(str, dtypes))}")
    return None
