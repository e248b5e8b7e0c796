"""What a host function may ask about the GPU that its kernels are compiled for."""

from __future__ import annotations

import functools

import torch
import triton
from triton.runtime.driver import driver

#: Processors that kernels are sized for where there is no GPU: few, so that interpreted kernels split too.
INTERPRETED = 8
COMPILED = 132


def backend() -> str:
    """ "cuda", "hip", or "interpreter"."""
    return "interpreter" if triton.knobs.runtime.interpret else driver.active.get_current_target().backend


def has_fp8_dot() -> bool:
    """Whether the matrix units multiply E4M3 values themselves."""
    if backend() != "cuda":
        return False
    return int(driver.active.get_current_target().arch) >= 89


def processors(device: torch.device) -> int:
    """Streaming multiprocessors or compute units of a device."""
    if device.type == "cuda":
        return _processors(device.index if device.index is not None else torch.cuda.current_device())
    return COMPILED if device.type == "meta" else INTERPRETED


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


__all__ = ["backend", "has_fp8_dot", "processors"]
