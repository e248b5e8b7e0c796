"""SGLang's causal convolution: its Triton kernel for prefill, its CUDA kernel, which works in place, for decode.

The kernel for prefill rounds each product to the inputs' dtype before it adds it: half precision is refused here, but
not within a whole layer, whose tolerance has room for it.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn
from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_update as update_in_place
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

from ._slots import batch_of, padded_rows, supports_batch, without_null


def supports_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | None,
    *_: object,
) -> Verdict:
    product = torch.promote_types(x.dtype, weight.dtype)
    if product.itemsize < 4:
        return no(f"SGLang's kernel rounds each product to {product}, where the operator sums in float32")
    return supports_prefill(x, weight, bias, cu_seqlens, state, has_initial_state)


def supports_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    has_initial_state: Tensor | None,
) -> Verdict:
    """Whether SGLang's kernel runs at all."""
    if has_initial_state is None or not has_initial_state.is_contiguous() or not cu_seqlens.is_contiguous():
        return no("SGLang's prefill convolution reads contiguous cu_seqlens and has_initial_state")
    if x.stride(0) == 1:
        return no("SGLang convolves in place where the rows of a channel are contiguous")
    batch = supports_batch(cu_seqlens)
    return _supports(x, weight, bias, state) if batch.ok else batch


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
    slots = without_null(slots, null_slot)
    y = timed_causal_conv1d(x, weight, bias, cu_seqlens, state, slots, has_initial_state, activation, None)
    return y.masked_fill(padded_rows(cu_seqlens, slots, x.shape[0])[:, None], 0.0)


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
    """What SGLang itself runs: padding has been marked when the batch was put together, its rows are nobody's."""
    return causal_conv1d_fn(
        x.T,
        weight,
        bias,
        activation=activation,
        conv_states=state,
        has_initial_state=has_initial_state,
        cache_indices=slots,
        query_start_loc=cu_seqlens,
        seq_lens_cpu=batch_of(cu_seqlens).lengths,
    ).T


def supports_causal_conv1d_update(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *_: object) -> Verdict:
    if state.shape[2] != weight.shape[1] - 1:
        return no("SGLang's kernel shifts the whole state, which may hold no more than the filter's past")
    return _supports(x, weight, bias, state)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    slots = without_null(slots, null_slot)
    y = timed_causal_conv1d_update(x.contiguous().clone(), weight, bias, state, slots, activation, None)
    return y.masked_fill(slots[:, None] < 0, 0.0)


def timed_causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    activation: str | None,
    null_slot: int | None,
) -> Tensor:
    """What SGLang itself runs: in place, with padding marked beforehand."""
    return update_in_place(x, state, weight, bias, activation, conv_state_indices=slots)


def _supports(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Verdict:
    if weight.shape[1] not in (2, 3, 4):
        return no(f"SGLang's kernel has no filter of {weight.shape[1]} taps")
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in (weight, bias, state)):
        return no("SGLang's kernel takes weight, bias and states in the dtype of its inputs")
    if not x.shape[0]:
        return no("SGLang's kernel is not launched without rows")
    if x.stride(1) != 1 or not weight.is_contiguous() or (bias is not None and bias.stride(0) != 1):
        return no("SGLang's kernel wants x, weight and bias contiguous in their last dimension")
    return YES
