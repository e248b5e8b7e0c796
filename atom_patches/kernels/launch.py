"""What a host function may ask about the GPU that its kernels are compiled for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

#: Processors that kernels are sized for where there is no GPU: few, so that interpreted kernels split too.
INTERPRETED = 8
COMPILED = 132


def backend() -> str:
    """ "cuda", "hip", or "interpreter"."""
    return "interpreter" if knobs.runtime.interpret else _target().backend


def has_fp8_dot() -> bool:
    """Whether the matrix units multiply E4M3 values themselves."""
    return backend() == "cuda" and int(_target().arch) >= 89


def converts_e4m3() -> bool:
    """Whether kernels can read and write E4M3 (OCP) at all: NVIDIA's can from compute capability 8.9 on."""
    return backend() != "cuda" or int(_target().arch) >= 89


def starts_early() -> bool:
    """Whether a kernel may be launched while the one before it still runs: NVIDIA's programmatic dependent launch."""
    return backend() == "cuda" and int(_target().arch) >= 90


def trades_registers() -> bool:
    """Whether warp groups multiply by themselves and hand registers to one another: Hopper's do."""
    return backend() == "cuda" and int(_target().arch) == 90


def has_large_shared_memory() -> bool:
    """Whether a program may have 227 KiB of shared memory: NVIDIA's data-centre GPUs from compute capability 9.0 on."""
    return backend() == "cuda" and 90 <= int(_target().arch) < 120


def _target() -> Any:
    return driver.active.get_current_target()  # pyright: ignore[reportOptionalMemberAccess]


def processors(device: torch.device) -> int:
    """Streaming multiprocessors or compute units of a device."""
    if device.type == "cuda":
        return _processors(device.index if device.index is not None else torch.cuda.current_device())
    return COMPILED if device.type == "meta" else INTERPRETED


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


__all__ = [
    "backend",
    "converts_e4m3",
    "has_fp8_dot",
    "has_large_shared_memory",
    "processors",
    "starts_early",
    "trades_registers",
]
