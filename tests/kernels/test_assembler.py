"""Kernels for Hopper come from the newest assembler; nobody else's do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom_patches import kernels
from atom_patches.kernels import assembler

ROOT = Path(kernels.__file__).parent

COMPILE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels, torch, triton, triton.language as tl
from triton import knobs
from atom_patches.kernels import assembler

def body(x):
    i = tl.arange(0, 16)
    tile = tl.load(x + i[:, None] * 16 + i[None, :])
    tl.store(x + i[:, None] * 16 + i[None, :], tl.dot(tile, tile))

before = knobs.nvidia.ptxas, os.environ.get("TRITON_PTXAS_PATH")
for target in ("cuda:90", "cuda:80"):
    for kind in (assembler.jit, triton.jit):
        found = []
        with compile_kernels.compiling_for(target, found):
            kind(body)[(1,)](torch.empty(256, device="meta"))
        (kernel,) = found
        toolkit = int.from_bytes(kernel.asm["cubin"][20:24], "little")  # where other ELF files have their own version
        print(target, kind.__module__.split(".")[0], f"{toolkit // 10}.{toolkit % 10}")
assert before == (knobs.nvidia.ptxas, os.environ.get("TRITON_PTXAS_PATH"))
print(knobs.nvidia.ptxas.version, assembler.newest().version)
"""

COMPILE_GLUON = """
import sys
sys.path.insert(0, sys.argv[1])
import compile_kernels, torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from atom_patches.kernels import assembler, gluon_assembler

def body(x):
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x + i, gl.load(x + i) + 1)

for kind in (gluon_assembler.gluon_jit, gluon.jit):
    found = []
    with compile_kernels.compiling_for("cuda:90", found):
        kind(body)[(1,)](torch.empty(128, device="meta"))
    toolkit = int.from_bytes(found[0].asm["cubin"][20:24], "little")
    print(f"{toolkit // 10}.{toolkit % 10}")
print(assembler.newest().version, assembler.knobs.nvidia.ptxas.version)
"""


def ran(script: str, folder: Path) -> list[str]:
    """The lines that a script prints in a process that compiles."""
    tools = Path(__file__).resolve().parents[2] / "tools"
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_PTXAS_PATH")}
    (folder / "kernel.py").write_text(script)
    run = subprocess.run(
        [sys.executable, str(folder / "kernel.py"), str(tools)],
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_who_assembles(tmp_path: Path) -> None:
    *made, versions = ran(COMPILE, tmp_path)
    default, newest = versions.split()
    assert made == [
        f"cuda:90 atom_patches {newest}",
        f"cuda:90 triton {default}",
        f"cuda:80 atom_patches {default}",
        f"cuda:80 triton {default}",
    ]


def test_who_assembles_gluon(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon")
    ours, theirs, versions = ran(COMPILE_GLUON, tmp_path)
    newest, default = versions.split()
    assert (ours, theirs) == (newest, default)


def test_a_newer_assembler_of_the_user_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"ptxas": assembler.knobs.NvidiaTool("/theirs", "13.10"), "ptxas_blackwell": None}
    tools["ptxas_blackwell"] = assembler.knobs.NvidiaTool("/triton", "13.9")
    monkeypatch.setattr(assembler.knobs, "nvidia", type("Nvidia", (), tools))
    assert assembler.newest().path == "/theirs"


def test_every_kernel_is_declared_with_our_jit() -> None:
    others = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if path.name != "assembler.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("triton.jit", "gluon.jit")
    ]
    assert not others, (
        "Hopper's wrong code comes back with `triton.jit` and `gluon.jit`: use assembler.jit and "
        "gluon_assembler.gluon_jit of atom_patches.kernels"
    )
