"""Contracts of AITER's causal convolutions (Triton)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from .checks import FLOATS, Arguments, contract

HOST = "ROCm/aiter 0e1be2b12a8c aiter/ops/triton/conv/causal_conv1d.py"
TEST = "ROCm/aiter 464dd844bcb1 op_tests/triton_tests/conv/test_causal_conv1d.py"
KERNELS = "ROCm/aiter 063c07191010 aiter/ops/triton/_triton_kernels/conv/causal_conv1d.py"


def _common(a: Arguments, channels: int, sequences: int, x_dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """weight, bias and the state indices."""
    weight = a.tensor("weight", shape=(channels, None), dtype=FLOATS, layout="rows")
    a.require(2 <= weight.shape[1] <= 4, f"width must be 2, 3 or 4, got {weight.shape[1]}")
    bias = a.optional("bias", shape=(channels,), dtype=FLOATS, layout="contiguous")
    a.require(weight.dtype == x_dtype and (bias is None or bias.dtype == x_dtype), "one dtype for x, weight and bias")
    a.require(a.get("activation") in (None, "silu", "swish"), f"unknown activation {a.get('activation')!r}")
    pad = a.integer("pad_slot_id") if "pad_slot_id" in a.values and isinstance(a.get("pad_slot_id"), int) else -1
    # The prefill kernel leaves the sequence out whose index is pad_slot_id, whatever its slot is.
    a.require(pad < 0, f"pad_slot_id {pad} is also the index of a sequence, which would be left out")
    name = "cache_indices" if "cache_indices" in a.values else "conv_state_indices"
    slots = a.tensor(name, shape=(sequences,), dtype=torch.int32, layout="contiguous")
    state = a.get("conv_states", a.get("conv_state"))
    inside = (slots == pad) | ((slots >= 0) & (slots < state.shape[0]))
    a.require(bool(inside.all()), f"{name} holds neither pad_slot_id nor a row of the state")
    return weight, bias, slots == pad


@contract(
    "aiter.ops.triton.conv.causal_conv1d:causal_conv1d_fn",
    "x weight bias conv_states query_start_loc seq_lens_cpu cache_indices has_initial_state activation pad_slot_id",
    HOST,
    KERNELS,
    TEST,
)
def causal_conv1d_fn(a: Arguments) -> Tensor:
    """x [dim, tokens]; `seq_lens_cpu` sizes the grid, so that a bound of the lengths does as well; rows outside every
    sequence, and those of padding, are left as `empty_like` made them."""
    x = a.tensor("x", shape=(None, None), dtype=FLOATS, layout="strided")
    a.require(x.stride(0) == 1 or x.stride(1) == 1 or min(x.shape) <= 1, "x must be dense along one dimension")
    starts = a.tensor("query_start_loc", shape=(None,), dtype=torch.int32, layout="contiguous")
    sequences = starts.shape[0] - 1
    state = a.tensor("conv_states", shape=(None, x.shape[0], None), dtype=x.dtype, layout="strided")
    weight, bias, padding = _common(a, x.shape[0], sequences, x.dtype)
    history = weight.shape[1] - 1
    a.require(state.shape[2] >= history, f"conv_states keeps {state.shape[2]} inputs, {history} are needed")
    resumed = a.optional("has_initial_state", shape=(sequences,), dtype=torch.bool, layout="contiguous")
    lengths = a.get("seq_lens_cpu")
    a.require(isinstance(lengths, list) and all(type(n) is int for n in lengths), "seq_lens_cpu must be a list of ints")
    a.require(len(lengths) == sequences > 0, f"seq_lens_cpu must have {sequences} entries, and one at least")
    a.require(max(lengths) >= int(starts.diff().max()), "seq_lens_cpu is less than a length: tokens are left out")
    out = torch.empty_like(x)
    bounds, slots = starts.tolist(), a.get("cache_indices").tolist()
    for i in range(sequences):
        first, last = bounds[i], bounds[i + 1]
        if padding[i] or first == last:
            continue
        past = torch.zeros(x.shape[0], history)
        if resumed is not None and resumed[i]:
            past = state[slots[i], :, :history].float()
        line = torch.cat([past, x[:, first:last].float()], 1)
        out[:, first:last] = _convolved(line, weight, bias, a.get("activation")).to(x.dtype)
        state[slots[i], :, :history] = line[:, line.shape[1] - history :].to(state.dtype)
    return out


@contract(
    "aiter.ops.triton.conv.causal_conv1d:causal_conv1d_update",
    "x conv_state weight bias activation conv_state_indices pad_slot_id",
    HOST,
    KERNELS,
    TEST,
)
def causal_conv1d_update(a: Arguments) -> Tensor:
    """One token per sequence, x [batch, dim]; the result overwrites x, and padding rows keep their input."""
    x = a.tensor("x", shape=(None, None), dtype=FLOATS, layout="rows")
    a.require(x.shape[0] > 0, "no rows: an empty grid is launched")
    state = a.tensor("conv_state", shape=(None, x.shape[1], None), dtype=x.dtype, layout="strided")
    weight, bias, padding = _common(a, x.shape[1], x.shape[0], x.dtype)
    history = weight.shape[1] - 1
    a.require(state.shape[2] >= history, f"conv_state keeps {state.shape[2]} inputs, {history} are needed")
    for row, slot in enumerate(a.get("conv_state_indices").tolist()):
        if padding[row]:
            continue
        line = torch.cat([state[slot, :, :history].float(), x[row].float()[:, None]], 1)
        x[row] = _convolved(line, weight, bias, a.get("activation"))[:, 0].to(x.dtype)
        state[slot, :, :history] = line[:, 1:].to(state.dtype)
    return x


def _convolved(line: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[D, H + T] -> [D, T]"""
    y = (line.unfold(1, weight.shape[1], 1) * weight.float()[:, None]).sum(2)
    if bias is not None:
        y = y + bias.float()[:, None]
    return y if activation is None else silu(y)
