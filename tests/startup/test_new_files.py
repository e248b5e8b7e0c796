"""What `new patch` and `new kernel` write passes the checks as it is: docs/write-a-patch.md, done in a copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import installed
from tools import startup

CHECKOUT = Path(__file__).parents[2]
COPIED = ("setup.py", "pyproject.toml", "atom_patches.pth", "atom_patches_boot.py", "README.md", "Makefile")
FOLDERS = ("atom_patches", "tools", "tests", "docs", "envs")
TARGET = "vllm.v1.engine.core:EngineCore.post_step"
PATCH = "vllm.example.post_step"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        shutil.copy(CHECKOUT / name, folder)
    for name in FOLDERS:
        shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    return folder


@pytest.fixture(scope="module")
def run(copy: Path) -> Run:
    """Run `python …` in the copy; what it printed."""

    def run(*arguments: str, status: int = 0) -> str:
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=copy,
            env=startup.environment(PYTHONPATH=str(copy), OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=550,
        )
        assert ran.returncode == status, ran.stdout[-4000:] + ran.stderr[-4000:]
        return ran.stdout + ran.stderr

    return run


@pytest.fixture(scope="module")
def patch(copy: Path, run: Run) -> Path:
    printed = run("-m", "atom_patches", "new", "patch", PATCH, "--target", TARGET)
    assert f"accept --ship {PATCH}" in printed
    return copy / "atom_patches" / "vllm" / "example" / "post_step.py"


@pytest.fixture(scope="module")
def kernel(copy: Path, run: Run) -> list[Path]:
    told = json.loads(run("-m", "atom_patches", "new", "kernel", "example", "--json"))
    assert all(Path(path).is_file() for path in told["written"]) and len(told["written"]) == 5
    assert told["next"][0] == "python -m pytest tests/kernels/test_example.py"
    package = sorted((copy / "atom_patches" / "kernels" / "example").glob("*.py"))
    assert [path.stem for path in package] == ["__init__", "bench", "reference", "triton_impl"]
    return [*package, copy / "tests" / "kernels" / "test_example.py"]


def test_the_files_are_without_findings(patch: Path, kernel: list[Path], run: Run) -> None:
    files = [str(path) for path in (patch, patch.with_name("__init__.py"), *kernel)]
    run("-m", "ruff", "check", *files)
    run("-m", "ruff", "format", "--check", *files)


@pytest.mark.long
def test_the_files_have_types_that_fit(patch: Path, kernel: list[Path], run: Run) -> None:
    files = [str(path) for path in (patch, *kernel)]
    run("-m", "pyright", "--pythonpath", sys.executable, *files)


@installed.needs_engine
@pytest.mark.skipif(installed.NAME != "vllm", reason="the guide's patch is one of vLLM's")
def test_the_patch_is_accepted_and_fits(patch: Path, run: Run) -> None:
    run("-m", "atom_patches", "accept", "--ship", PATCH)
    explained = run("-m", "atom_patches", "explain", PATCH)
    assert "as reviewed" in explained and f"{TARGET}  " in explained
    assert " passed" in run("-m", "pytest", "-q", "tests/drift/test_reviewed_sources.py", "-k", f"{PATCH} or post_step")


@installed.needs_engine
@pytest.mark.long
@pytest.mark.skipif(installed.NAME != "vllm", reason="the guide's patch is one of vLLM's")
def test_the_patch_stands_every_order(patch: Path, run: Run) -> None:
    run("-m", "atom_patches", "accept", "--ship", PATCH)
    assert " passed" in run("-m", "pytest", "-q", "tests/ordering", "tests/drift/test_reviewed_sources.py", "-k", PATCH)


def test_the_kernel_is_right(kernel: list[Path], run: Run) -> None:
    assert " passed" in run("-m", "pytest", "-q", "tests/kernels/test_example.py")
    run("tools/kernel_table.py", "--write")
    run("tools/kernel_table.py", "--check")


@pytest.mark.long
def test_the_kernel_compiles_for_both_targets(kernel: list[Path], run: Run) -> None:
    pytest.importorskip("triton")
    run("tools/compile_kernels.py", "example")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("patch", "vllm.post_step", "--target", TARGET), "an id is ENGINE.FEATURE.NAME"),
        (("patch", "mill.example.scale", "--target", TARGET), "with vllm or sglang for ENGINE"),
        (("patch", "vllm.example.other", "--target", "vllm.v1"), "a target is written module:qualname"),
        (("patch", PATCH, "--target", TARGET), "is there already"),
        (("kernel", "Example"), "a name has lower-case letters"),
        (("kernel", "example"), "is there already"),
    ],
)
def test_what_cannot_be_begun_is_said(
    patch: Path, kernel: list[Path], run: Run, arguments: tuple[str, ...], message: str
) -> None:
    assert message in run("-m", "atom_patches", "new", *arguments, status=1)


def test_an_installed_package_is_no_checkout(tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "atom_patches", tmp_path / "atom_patches", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "atom_patches", "new", "kernel", "example"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "not in a checkout" in ran.stderr
