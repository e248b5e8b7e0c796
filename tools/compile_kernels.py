"""Compile every Triton kernel for real GPUs, on a machine that has none.

    python tools/compile_kernels.py [FAMILY ...] [--target cuda:90] [--target hip:gfx942] [--reports]

The Triton providers run on meta tensors at the benchmark's shapes, with a driver that compiles and launches nothing.
That also shows that no host function reads a tensor's data: a meta tensor has none. For CUDA the table holds each
kernel's registers, spills and shared memory, as ptxas and Triton report them.
Exit status 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from atom_patches.core import settings  # noqa: E402
from atom_patches.kernels import assembler, registry  # noqa: E402

TARGETS = ("cuda:90", "hip:gfx942")
SHARED_LIMIT = {"cuda:80": 166912, "cuda:89": 101376, "cuda:90": 232448, "hip:gfx942": 65536}
"""Bytes of shared memory a program (CUDA programming guide, table of compute capabilities; CDNA 3 ISA)."""


class Compiled(NamedTuple):
    """One kernel for one target."""

    case: str
    kernel: str
    target: str
    shared: int
    registers: str
    spills: str
    warps: int
    stages: int


class CompileOnly:
    """A Triton driver of a GPU that is not there; each target is a device, because Triton keeps kernels by device."""

    devices: dict[GPUTarget, int] = {}

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.device = self.devices.setdefault(target, len(self.devices))

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def parse_target(text: str) -> GPUTarget:
    backend, _, arch = text.partition(":")
    return GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)


@contextmanager
def compiling_for(target: str, found: list[Any]) -> Iterator[None]:
    """Within it, a launch compiles for `target` and adds the compiled kernel to `found`."""
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        sizes: Any = grid(options) if callable(grid) else grid
        assert all(size > 0 for size in sizes), f"{self.__name__} is launched with the empty grid {sizes}"
        kernel: Any = plain(self, *args, grid=grid, warmup=True, **options)
        assert ("ptx" if target.startswith("cuda") else "amdgcn") in kernel.asm, f"{self.__name__} was not compiled"
        found.append(kernel)
        return kernel

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(driver, "_active", CompileOnly(parse_target(target))),
    ):
        yield


def resources(kernel: Any, target: str) -> tuple[str, str]:
    """Registers and spilled bytes a thread, from ptxas; "-" for other targets."""
    if not target.startswith("cuda"):
        return "-", "-"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        arch = re.search(r"\.target (\w+)", kernel.asm["ptx"])
        command = [
            assembler.newest().path,
            "-v",
            f"-arch={arch[1] if arch else 'sm_90a'}",
            file.name,
            "-o",
            os.devnull,
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    return used[1] if used else "?", spilled[1] if spilled else "?"


def cases(family: str) -> Iterator[Any]:
    try:
        yield from importlib.import_module(f"atom_patches.kernels.{family}.bench").CASES
    except ModuleNotFoundError as error:
        if error.name != f"atom_patches.kernels.{family}.bench":
            raise
        print(f"compile: {family} has no benchmark cases", file=sys.stderr)


def compile_case(case: Any, target: str) -> Iterator[Compiled]:
    operation = case.operation
    arguments = case.inputs(torch.device("meta"))
    kernels: list[Any] = []
    with compiling_for(target, kernels):
        verdict = registry.supports(operation, "triton", arguments)
        if not verdict.ok:
            print(f"compile: {operation.name} {case.label} for {target}: {verdict.reason}", file=sys.stderr)
            return
        registry.implementation(operation, "triton")(*arguments)
    for kernel in kernels:
        meta = kernel.metadata
        yield Compiled(
            f"{operation.name} {case.label}", meta.name, target, meta.shared, *resources(kernel, target),
            meta.num_warps, meta.num_stages,
        )  # fmt: skip


def compile_all(families: list[str], targets: list[str]) -> tuple[list[Compiled], int]:
    """Every distinct kernel, and how many cases failed; failures are printed."""
    found: dict[tuple[Any, ...], Compiled] = {}
    failures = 0
    for case, target in ((case, target) for family in families for case in cases(family) for target in targets):
        name = f"{case.operation.name} {case.label} for {target}"
        started = time.monotonic()
        try:
            for one in compile_case(case, target):
                found.setdefault(one[1:], one)
                if one.shared > SHARED_LIMIT.get(target, one.shared):
                    failures += 1
                    print(f"compile: {name}: {one.kernel} takes {one.shared} bytes of shared memory")
        except Exception:
            failures += 1
            print(f"compile: {name}:\n{traceback.format_exc()}")
        if time.monotonic() - started > 20:
            print(f"compile: {name} took {time.monotonic() - started:.0f} s", file=sys.stderr)
    return list(found.values()), failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--target", action="append", help=f"default: {' and '.join(TARGETS)}")
    parser.add_argument("--reports", action="store_true", help="the registers, spills and shared memory of each kernel")
    options = parser.parse_args()
    families = options.families or list(settings.kernel_families())
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": cache}):
        found, failures = compile_all(families, options.target or list(TARGETS))
    if options.reports:
        for one in sorted(found, key=lambda c: (c.target, c.kernel)):
            used = f"regs {one.registers:>4} spills {one.spills:>5} shared {one.shared:>7}"
            print(f"{one.target:10} {one.kernel:36} {used} warps {one.warps} stages {one.stages}  {one.case}")
    print(f"compile: {len(found)} kernels, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
