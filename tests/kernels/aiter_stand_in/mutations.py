"""What can be wrong with a call: every small fault of every call that a binding makes.

A fault is found if the stand-in refuses the call, or if the operator's result is no longer the reference's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = tuple[str, tuple[Any, ...], dict[str, Any]]

_CONV = "aiter.ops.triton.conv.causal_conv1d"
_CHUNKED = "aiter.ops.triton.gated_delta_net.gated_delta_rule:chunk_gated_delta_rule_opt_vk"
_STEP = "aiter.ops.triton.gated_delta_net.fused_rearrange_sigmoid_gdr:fused_rearrange_sigmoid_gated_delta_rule"
_PREFILL = "aiter.ops.mha:mha_batch_prefill_func"
_ROPE = "aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache:fused_qkv_split_qk_norm_rope_cache"

#: Faults that change nothing: (function, kind, arguments). AITER computes the same from the changed call.
HARMLESS = {
    ("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add", "swap", "input, residual_in"),  # their sum is the same
    (f"{_CONV}:causal_conv1d_fn", "drop", "pad_slot_id"),  # its default, PAD_SLOT_ID, is -1
    (f"{_CONV}:causal_conv1d_update", "drop", "pad_slot_id"),
    (_ROPE, "dtype torch.int32 of", "positions"),  # Triton reads either
    (_ROPE, "dtype torch.int32 of", "slot_mapping"),
    (_CHUNKED, "dtype torch.bfloat16 of", "beta"),  # the call sites have both
    (_CHUNKED, "dtype torch.int64 of", "cu_seqlens"),
    (_STEP, "dtype torch.float32 of", "dt_bias"),  # converted as it is read
    (_STEP, "dtype torch.float32 of", "initial_state"),
    (_STEP, "dtype torch.bfloat16 of", "initial_state"),
    (_PREFILL, "one more than", "max_seqlen_q"),  # bounds
    (_PREFILL, "one more than", "max_seqlen_k"),
    (_PREFILL, "one row less of", "kv_page_indices"),  # not read beside a block table
    ("aiter.mla:mla_decode_fwd", "one row less of", "kv_indices"),  # has an entry more than kv_indptr counts
}


Change = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Mutation:
    """One fault of the call of index `call`.

    Attributes:
        apply: makes the faulty call out of the right one.
        refused: the stand-in itself must refuse it; otherwise a wrong result will do.
    """

    call: int
    target: str
    kind: str
    which: str
    apply: Change
    refused: bool

    def __str__(self) -> str:
        return f"call {self.call} of {self.target}: {self.kind} {self.which}"


def mutations(calls: list[Call], signatures: dict[str, inspect.Signature]) -> Iterator[Mutation]:
    """Every fault of every call."""
    for index, (target, args, kwargs) in enumerate(calls):
        for kind, which, apply, refused in _of_call(args, kwargs, signatures[target]):
            if (target, kind, which) not in HARMLESS:
                yield Mutation(index, target, kind, which, apply, refused)


def _of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature
) -> Iterator[tuple[str, str, Change, bool]]:
    names = list(signature.parameters)
    for i, name in enumerate(names[: len(args)]):
        default = signature.parameters[name].default
        last = i == len(args) - 1
        if not (last and _same(default, args[i])):
            shifts = not last or default is inspect.Parameter.empty
            yield "drop", name, lambda a, k, i=i: (a[:i] + a[i + 1 :], k), shifts
        if i and not _same(args[i - 1], args[i]):
            swap: Change = lambda a, k, i=i: (a[: i - 1] + (a[i], a[i - 1]) + a[i + 1 :], k)  # noqa: E731
            yield "swap", f"{names[i - 1]}, {name}", swap, False
        for kind, change, refused in _of_value(args[i]):
            yield kind, name, lambda a, k, i=i, c=change: (a[:i] + (c(a[i]),) + a[i + 1 :], k), refused
    for name, value in kwargs.items():
        parameter = signature.parameters.get(name)
        if parameter is not None and not _same(parameter.default, value):
            yield "drop", name, lambda a, k, n=name: (a, {key: v for key, v in k.items() if key != n}), False
        yield "rename", name, lambda a, k, n=name: (a, {key + "_" * (key == n): v for key, v in k.items()}), True
        for kind, change, refused in _of_value(value):
            yield kind, name, lambda a, k, n=name, c=change: (a, {**k, n: c(k[n])}), refused


def _of_value(value: Any) -> Iterator[tuple[str, Callable[[Any], Any], bool]]:
    """(kind, what makes another value of it, whether the stand-in must refuse that)"""
    if isinstance(value, Tensor):
        for dtype in _others(value.dtype):
            yield f"dtype {dtype} of", lambda t, d=dtype: t.to(d), True
        if value.dim() >= 2 and value.shape[-1] != value.shape[-2]:
            yield "transpose", lambda t: t.mT, True
        if value.dim():
            yield "one dimension more of", lambda t: t[None], True
        if value.dim() and value.shape[0] > 1:
            yield "one row less of", lambda t: t[:-1], False
        yield "no", lambda t: None, False
    elif isinstance(value, bool):
        yield "not", lambda v: not v, False
    elif isinstance(value, int):
        yield "one more than", lambda v: v + 1, False
    elif isinstance(value, float):
        yield "twice", lambda v: v * 2 + 1, False
    elif isinstance(value, str):
        yield "another text for", lambda v: v + "x", False


#: Pools that are written to with whatever strides they have: a copy of them would only miss the writes.
_POOLS = ("conv_states", "conv_state", "key_cache", "value_cache", "kv_cache", "initial_state")


def scattered(calls: list[Call], signatures: dict[str, inspect.Signature]) -> Iterator[Mutation]:
    """Every call with one tensor whose values are no neighbours in memory."""
    for index, (target, args, kwargs) in enumerate(calls):
        names = list(signatures[target].parameters)
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and value.numel() > 1 and names[i] not in _POOLS:
                change: Change = lambda a, k, i=i: (a[:i] + (_sparse(a[i]),) + a[i + 1 :], k)  # noqa: E731
                yield Mutation(index, target, "values apart of", names[i], change, False)
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.numel() > 1 and name not in _POOLS:
                change = lambda a, k, n=name: (a, {**k, n: _sparse(k[n])})  # noqa: E731
                yield Mutation(index, target, "values apart of", name, change, False)


def _sparse(value: Tensor) -> Tensor:
    wide = value.new_zeros(*value.shape, 2)
    wide[..., 0] = value
    return wide[..., 0]


def _others(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    if dtype.is_floating_point:
        return (torch.float64, torch.float32 if dtype != torch.float32 else torch.bfloat16)
    return (torch.float32, torch.int64 if dtype != torch.int64 else torch.int32)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return type(a) is type(b) and a == b
