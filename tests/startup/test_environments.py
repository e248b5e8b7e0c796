"""The development environments: two checkouts share what is downloaded and never each other's code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
COPIED = ("setup.py", "pyproject.toml", "atom_patches.pth", "atom_patches_boot.py", "README.md")
FOLDERS = ("atom_patches", "tools", "envs")
ENGINE = "vllm-0.20.2"


def joined_copy(folder: Path) -> Path:
    """A second checkout with an environment of its own; its interpreter."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copy(CHECKOUT / name, folder)
    for name in FOLDERS:
        shutil.copytree(CHECKOUT / name, folder / name, ignore=ignore)
    done = subprocess.run(
        [sys.executable, "tools/build_env.py", ENGINE], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def run(python: Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkout").resolve()
    return folder, joined_copy(folder)


def test_each_checkout_imports_its_own_code(copy: tuple[Path, Path]) -> None:
    folder, python = copy
    where = "import atom_patches; print(atom_patches.__file__)"
    assert run(python, where) == str(folder / "atom_patches" / "__init__.py")
    assert run(Path(sys.executable), where) == str(CHECKOUT / "atom_patches" / "__init__.py")


def test_a_checkout_s_environment_has_the_base_s_packages_and_its_own_entry_points(copy: tuple[Path, Path]) -> None:
    _, python = copy
    code = (
        "import importlib.metadata as m, torch, vllm;"
        "print(vllm.__version__, sorted(e.group for e in m.entry_points(name='atom')))"
    )
    assert run(python, code) == "0.20.2 ['sglang.srt.plugins', 'vllm.general_plugins', 'vllm.platform_plugins']"


def test_joining_again_does_nothing(copy: tuple[Path, Path]) -> None:
    folder, python = copy
    before = (folder / ".venv" / ENGINE / "complete").stat().st_mtime_ns
    again = subprocess.run(
        [sys.executable, "tools/build_env.py", ENGINE], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert (again.stdout.strip(), again.stderr) == (str(python), "")
    assert (folder / ".venv" / ENGINE / "complete").stat().st_mtime_ns == before
