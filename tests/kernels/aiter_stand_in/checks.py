"""What contracts are written with: a registry, the bound arguments, and checks that say which argument is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

#: How an argument may lie in memory: densely; its last dimension densely; anyhow (the function takes its strides).
Layout = Literal["contiguous", "rows", "strided"]

FLOAT16 = (torch.bfloat16, torch.float16)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class Violation(AssertionError):
    """A call that AITER would refuse, or would compute something else from."""


@dataclass(frozen=True)
class Contract:
    """What a function of AITER demands.

    Args:
        function: takes the bound arguments; returns and writes what AITER's function does.
        parameters: those that the contract covers. A call that passes another one is a violation.
        sources: where the demands are documented: repository, commit, path.
    """

    function: Callable[[Arguments], Any]
    parameters: frozenset[str]
    sources: tuple[str, ...]


CONTRACTS: dict[str, Contract] = {}


def contract(target: str, parameters: str, *sources: str) -> Callable[[Callable[[Arguments], Any]], Any]:
    """Register the decorated function as the contract of `target`; `parameters` are separated by spaces."""

    def register(function: Callable[[Arguments], Any]) -> Callable[[Arguments], Any]:
        CONTRACTS[target] = Contract(function, frozenset(parameters.split()), sources)
        return function

    return register


class Arguments:
    """The arguments of one call, by parameter name, with defaults applied."""

    def __init__(self, target: str, values: dict[str, Any]) -> None:
        self.target = target
        self.values = values

    def get(self, name: str, absent: Any = None) -> Any:
        """An argument, or `absent` where this lane has no such parameter."""
        return self.values.get(name, absent)

    def fail(self, message: str) -> None:
        raise Violation(f"{self.target}: {message}")

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    def tensor(
        self,
        name: str,
        *,
        shape: tuple[int | None, ...],
        dtype: tuple[torch.dtype, ...] | torch.dtype,
        layout: Layout,
        align: int = 1,
    ) -> Tensor:
        """A tensor argument.

        Args:
            shape: sizes; None where any is right.
            align: bytes that its address, and every stride but the last, must be a multiple of.
        """
        value = self.get(name)
        self.require(isinstance(value, Tensor), f"{name} must be a tensor, got {type(value).__name__}")
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        self.require(value.dtype in dtypes, f"{name} is {value.dtype}, not one of {dtypes}")
        fits = value.dim() == len(shape) and all(w is None or g == w for g, w in zip(value.shape, shape, strict=True))
        self.require(fits, f"{name} is {tuple(value.shape)}, not {shape}")
        if layout == "contiguous":
            self.require(value.is_contiguous(), f"{name} must be contiguous, its strides are {value.stride()}")
        elif layout == "rows":
            dense = value.stride(-1) == 1 or value.shape[-1] == 1
            self.require(dense, f"{name} must be contiguous in its last dimension, its strides are {value.stride()}")
        if align > 1:
            size = value.element_size()
            steps = [s * size for s, n in zip(value.stride()[:-1], value.shape[:-1], strict=True) if n > 1]
            aligned = value.data_ptr() % align == 0 and all(s % align == 0 for s in steps)
            self.require(aligned, f"{name} must be aligned to {align} bytes")
        return value

    def optional(self, name: str, **demands: Any) -> Tensor | None:
        """A tensor argument, or None."""
        return None if self.get(name) is None else self.tensor(name, **demands)

    def number(self, name: str) -> float:
        """A float; AITER's compiled functions convert an int, never a bool or a tensor."""
        value = self.get(name)
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        self.require(right, f"{name} must be a number, got {type(value).__name__}")
        return float(value)

    def integer(self, name: str) -> int:
        value = self.get(name)
        right = isinstance(value, int) and not isinstance(value, bool)
        self.require(right, f"{name} must be an int, got {type(value).__name__}")
        return value

    def flag(self, name: str, absent: bool = False) -> bool:
        value = self.get(name, absent)
        self.require(isinstance(value, bool), f"{name} must be a bool, got {type(value).__name__}")
        return value
