"""What a provider promises: the reference's outputs, the reference's writes, and nothing else.

Tests and the benchmark hold a provider to it with the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, dtype_name


class ContractError(AssertionError):
    """A provider's result is not the reference's; the message says where and by how much."""


def clones(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call on memory of its own: strides and offsets are kept, and views of one buffer share one again."""
    buffers: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        buffer = value.untyped_storage()
        if buffer._cdata not in buffers:
            buffers[buffer._cdata] = buffer.clone()
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(buffers[buffer._cdata], *place)

    return tuple(copy(argument) for argument in arguments)


def tolerance_of(operation: Operation, arguments: tuple[Any, ...]) -> tuple[float, float]:
    """The (relative, absolute) tolerance of a call: the widest that the operation states for one of its dtypes."""
    stated = operation.tolerance
    found = [stated[name] for name in _dtype_names(arguments) if name in stated]
    return max(found) if found else max(stated.values())


def check(operation: Operation, function: Callable[..., Any], arguments: tuple[Any, ...], wanted: Expected) -> float:
    """Hold one call of `function` to the reference's results.

    Args:
        arguments: the call's arguments, which the function may write to: give it clones.
        wanted: what `expected` returned for the same arguments.

    Returns:
        the largest absolute error of an output or a written argument.

    Raises:
        ContractError: something differs by more than the tolerance.
    """
    tolerance = tolerance_of(operation, arguments)
    results = results_of(operation, function, arguments)
    if len(results) != len(wanted):
        raise ContractError(f"{len(results)} results, not {len(wanted)}")
    worst = 0.0
    for name, got in results.items():
        worst = max(worst, compare(name, got, wanted[name], tolerance))
    return worst


Expected = dict[str, Tensor]


def results_of(operation: Operation, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Expected:
    """Call `function`: its outputs, and the arguments that the schema lets it write to, by name.

    What an output holds where the schema promises nothing becomes 0, and where it promises no order a row's entries are
    sorted, in every provider's and in the reference's.
    """
    found = outputs_of(function(*arguments))
    if operation.unspecified is not None:
        found["output 0"].masked_fill_(operation.unspecified(*arguments), 0.0)
    if operation.unordered is not None and operation.unordered(*arguments):
        found["output 0"] = found["output 0"].sort(dim=-1).values
    for position in operation.mutated:
        for i, tensor in enumerate(_tensors(arguments[position])):
            found[f"written argument {position}" + (f"[{i}]" if i else "")] = tensor
    return found


def outputs_of(results: Any) -> Expected:
    """The tensors that a call returned, by name."""
    return {f"output {i}": tensor for i, tensor in enumerate(_tensors(results))}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


def _dtype_names(arguments: tuple[Any, ...]) -> list[str]:
    return [dtype_name(t.dtype) for argument in arguments for t in _tensors(argument)]


def touched(operation: Operation, before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    """Arguments that a call changed though the schema does not let it; bytes are compared, so NaN equals itself."""
    found: list[str] = []
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if position in operation.mutated:
            continue
        for a, b in zip(_tensors(old), _tensors(new), strict=True):
            if a.numel() and not torch.equal(_bytes(a), _bytes(b)):
                found.append(f"argument {position}")
    return found


def compare(name: str, got: Tensor, want: Tensor, tolerance: tuple[float, float]) -> float:
    """The largest absolute difference; raises ContractError where it is more than the tolerance."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ContractError(
            f"{name} is {tuple(got.shape)} {dtype_name(got.dtype)}, not {tuple(want.shape)} {dtype_name(want.dtype)}"
        )
    if not got.numel():
        return 0.0
    if not got.dtype.is_floating_point:
        wrong = int((got != want).sum())
        if wrong:
            raise ContractError(f"{name}: {wrong} of {got.numel()} entries differ")
        return 0.0
    rtol, atol = tolerance
    got, want = got.float(), want.float()
    error = torch.where(got == want, 0.0, (got - want).abs())  # equal infinities do not differ
    error = torch.where(got.isnan() & want.isnan(), 0.0, error).nan_to_num_(nan=torch.inf)
    wrong = error > atol + rtol * want.abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    worst = float(error.max())
    if wrong.any():
        place = tuple(int(i) for i in torch.unravel_index(torch.where(wrong, error, -1.0).argmax(), error.shape))
        raise ContractError(
            f"largest error {float(error[place]):.3g} in {name} at {place}: {float(got[place]):.6g}, not "
            f"{float(want[place]):.6g} (allowed: {rtol:g} of the value + {atol:g}); {int(wrong.sum())} of "
            f"{error.numel()} elements are out"
        )
    return worst
