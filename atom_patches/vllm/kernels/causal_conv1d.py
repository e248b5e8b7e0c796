"""vLLM's own causal convolution, as its GatedDeltaNet layers call it.

vLLM convolves decoded rows in place, leaves the output rows of padding unwritten, and knows one padding slot only. What
the operators promise beyond that costs a little more; the `timed_` functions are the calls that vLLM makes. Its kernels
round each product to the inputs' dtype before they add it: half precision is refused here, but not within a whole
layer, whose tolerance has room for it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.model_executor.layers.mamba.ops import causal_conv1d as vllm_conv
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from atom_patches.kernels.causal_conv1d._checks import check_filter, check_per_sequence, check_pool, count_sequences
from atom_patches.kernels.registry import YES, Verdict, no

#: Rows of x that one program of the prefill kernel takes.
ROWS = 8


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
    exact = supports_precision(x, weight)
    if not exact.ok:
        return exact
    return supports_prefill(x, weight, bias, cu_seqlens, state, slots, has_initial_state, activation, null_slot)


def supports_prefill(
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
    """Whether vLLM's kernel runs at all."""
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("has_initial_state", has_initial_state, slots.shape[0])
    if has_initial_state is None:
        return no("vLLM's prefill convolution reads has_initial_state")
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing() and _kept(cu_seqlens, x.shape[0]) is None:
        return no("vLLM prepares its prefill convolution before the layers run, outside CUDA graphs")
    return supports_filter(x, weight, bias, state, cu_seqlens, has_initial_state)


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
    slots, null = one_padding_slot(slots, null_slot)
    y = timed_causal_conv1d(x, weight, bias, cu_seqlens, state, slots, has_initial_state, activation, null)
    return clear_padding(y, cu_seqlens, slots != null)


def timed_causal_conv1d(
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
    y = vllm_conv.causal_conv1d_fn(
        x.T,
        weight,
        bias,
        activation=activation,
        conv_states=state,
        has_initial_state=has_initial_state,
        cache_indices=slots,
        query_start_loc=cu_seqlens,
        null_block_id=null_slot,  # type: ignore[arg-type]
        metadata=_metadata(cu_seqlens, x.shape[0]),
    )
    return y.T


def supports_causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, x.shape[0])
    exact = supports_precision(x, weight)
    return supports_filter(x, weight, bias, state) if exact.ok else exact


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    slots, null = one_padding_slot(slots, null_slot)
    y = timed_causal_conv1d_update(x.clone(), weight, bias, state, slots, activation, null)
    return y.masked_fill_((slots == null)[:, None], 0)


def timed_causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    return vllm_conv.causal_conv1d_update(
        x,
        state,
        weight,
        bias,
        activation,
        conv_state_indices=slots,
        null_block_id=null_slot,  # type: ignore[arg-type]
        validate_data=False,
    )


def supports_causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Verdict:
    check_filter(x, weight, bias, activation)
    check_pool(weight, state, slots, count_sequences(cu_seqlens))
    check_per_sequence("num_accepted", num_accepted, slots.shape[0])
    exact = supports_precision(x, weight)
    return supports_filter(x, weight, bias, state, cu_seqlens, num_accepted) if exact.ok else exact


def causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    slots, null = one_padding_slot(slots, null_slot)
    y = x.clone()
    timed_causal_conv1d_verify(y, weight, bias, cu_seqlens, state, slots, num_accepted, activation, null)
    return clear_padding(y, cu_seqlens, slots != null)


def timed_causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    return vllm_conv.causal_conv1d_update(
        x,
        state,
        weight,
        bias,
        activation,
        conv_state_indices=slots,
        num_accepted_tokens=num_accepted,
        query_start_loc=cu_seqlens,
        max_query_len=state.shape[2] - weight.shape[1] + 2,
        null_block_id=null_slot,  # type: ignore[arg-type]
        validate_data=False,
    )


def one_padding_slot(slots: Tensor, null_slot: int | None) -> tuple[Tensor, int]:
    """Slots whose padding is one value, and that value."""
    if null_slot is None:
        return slots.clamp(min=-1), -1
    return slots.masked_fill(slots < 0, null_slot), null_slot


def clear_padding(y: Tensor, cu_seqlens: Tensor, real: Tensor) -> Tensor:
    """y [T, ...] with zeros in the rows of sequences that are not `real` [N], and in those of no sequence."""
    row = torch.arange(y.shape[0], device=y.device)
    sequence = torch.searchsorted(cu_seqlens.long(), row, right=True) - 1
    owned = (sequence >= 0) & (sequence < real.shape[0])
    owned &= torch.cat([real, real.new_zeros(1)])[sequence.clamp(min=0)]
    return torch.where(owned.view(-1, *[1] * (y.dim() - 1)), y, torch.zeros((), dtype=y.dtype, device=y.device))


def supports_precision(x: Tensor, weight: Tensor) -> Verdict:
    """Whether the products are as precise as the operators promise."""
    product = torch.promote_types(x.dtype, weight.dtype)
    if product.itemsize < 4:
        return no(f"vLLM's kernel rounds each product to {product}, where the operator sums in float32")
    return YES


def supports_filter(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *vectors: Tensor) -> Verdict:
    if weight.shape[1] not in (2, 3, 4):
        return no(f"vLLM's kernel has no filter of {weight.shape[1]} taps")
    if x.dtype != state.dtype:
        return no(f"vLLM's kernel keeps states in the dtype of its inputs: {state.dtype} is not {x.dtype}")
    if not x.shape[0]:
        return no("vLLM's kernel is not launched without rows")
    if x.stride(1) != 1 or weight.stride(1) != 1 or (bias is not None and bias.stride(0) != 1):
        return no("vLLM's kernel wants x, weight and bias contiguous in their last dimension")
    if not all(vector.shape[0] for vector in vectors):
        return no("vLLM's kernel is not launched without sequences")
    if any(vector.stride(0) != 1 for vector in vectors):
        return no("vLLM's kernel wants cu_seqlens and what goes with it contiguous")
    return YES


_prepared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _metadata(cu_seqlens: Tensor, rows: int) -> Any:
    """Which sequence and which block of rows each program takes, as vLLM prepares it once a step for all layers.

    Kept as long as cu_seqlens lives unchanged; an inference tensor does not tell whether it was, and is prepared anew.
    """
    if (kept := _kept(cu_seqlens, rows)) is not None:
        return kept
    counts = (cu_seqlens.diff() + ROWS - 1) // ROWS
    ends = counts.cumsum(0)
    bound = rows // ROWS + counts.shape[0]
    program = torch.arange(bound, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, program, right=True)
    owned = sequence < counts.shape[0]
    block = program - (ends - counts)[sequence.clamp(max=counts.shape[0] - 1)]
    sequence = torch.where(owned, sequence, PAD_SLOT_ID).to(torch.int32)
    block = torch.where(owned, block, PAD_SLOT_ID).to(torch.int32)
    arrays = {"batch_ptr": sequence, "token_chunk_offset_ptr": block}
    programs = {"tot": bound, "mlist": sequence, "mlist_len": bound, "offsetlist": block, **arrays}
    found = SimpleNamespace(nums_dict={ROWS: programs}, **arrays)
    if not cu_seqlens.is_inference():
        _prepared[cu_seqlens] = ((cu_seqlens._version, rows), found)
    return found


def _kept(cu_seqlens: Tensor, rows: int) -> Any:
    """What was prepared earlier, or None."""
    found = None if cu_seqlens.is_inference() else _prepared.get(cu_seqlens)
    return found[1] if found is not None and found[0] == (cu_seqlens._version, rows) else None


__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "clear_padding",
    "one_padding_slot",
    "supports_causal_conv1d",
    "supports_causal_conv1d_update",
    "supports_causal_conv1d_verify",
    "supports_filter",
    "supports_prefill",
    "timed_causal_conv1d",
    "timed_causal_conv1d_update",
    "timed_causal_conv1d_verify",
]
