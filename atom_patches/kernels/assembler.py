"""`jit`: Triton's own, except that kernels for Hopper are assembled by the newest ptxas at hand.

Triton 3.6 brings two: 12.8 for everything before Blackwell, and 12.9. On an H200, 12.8 makes wrong machine code of
right PTX: warp-group products with a second operand of less than 64 columns gave wrong sums or illegal accesses, now
and then, in kernels that are right, and equally fast, when 12.9 or 13.0 assembles them, or 12.8 without optimisation.
Others met the same (fla-org/flash-linear-attention#1262, triton-lang/triton#11781). An assembler that the user names
in TRITON_PTXAS_PATH is taken if it is newer. Kernels of the engine are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

HOPPER = range(90, 100)
"""Architectures with warp-group products; Triton itself takes the newer assembler after them."""


class Kernel(JITFunction[Any]):
    """A Triton function that `newest` assembles where it is compiled for Hopper."""

    @property
    def cache_key(self) -> str:
        """Triton's key of the source; what another assembler made of the same source is not found under it."""
        try:
            return f"{super().cache_key}-{newest().version}"
        except RuntimeError:  # Triton for AMD brings no assembler of NVIDIA's
            return super().cache_key

    def _do_compile(self, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        cached: Any = self.device_caches[device]
        _, _, target, backend, _ = cached
        if target.backend != "cuda" or int(target.arch) not in HOPPER:
            return super()._do_compile(key, signature, device, *rest)
        backend.hash()  # Triton remembers the version that it meets first as that of its default assembler
        with _assembled_by(newest()):
            return super()._do_compile(key, signature, device, *rest)


def _declare(function: Callable[..., Any] | None = None, *, do_not_specialize: Iterable[str] = ()) -> Any:
    """Declare a Triton kernel, or a function that kernels call.

    Args:
        do_not_specialize: integer arguments whose value changes from call to call, so that no value of theirs is
            compiled in.
    """
    if function is None:
        return lambda function: _declare(function, do_not_specialize=do_not_specialize)
    names = list(do_not_specialize)
    if knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=names)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return Kernel(function, do_not_specialize=names)


if TYPE_CHECKING:
    from triton import jit  # kernels are checked as Triton's
else:
    jit = _declare


def newest() -> knobs.NvidiaTool:
    """The newest of the assemblers that Triton knows; of two of one version, the one that it would take."""
    return max((knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell), key=lambda tool: _version(tool.version))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@contextmanager
def _assembled_by(tool: knobs.NvidiaTool) -> Iterator[None]:
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = tool.path
        yield


__all__ = ["Kernel", "jit", "newest"]
