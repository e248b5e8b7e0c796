"""A real wheel and a real editable install, each in an environment of its own, and what uninstalling leaves."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import startup

CHECKOUT = Path(__file__).parents[2]
SOURCES = (
    "setup.py", "pyproject.toml", "atom_patches.pth", "atom_patches_boot.py", "README.md", "LICENSE", "atom_patches"
)  # fmt: skip

ARMED = "import sys; print(any(m.split('.')[0] == 'atom_patches' for m in sys.modules))"
ENTRY_POINTS = """
from importlib.metadata import distribution
for e in sorted(distribution("atom-patches").entry_points, key=lambda e: e.group): print(e.group, e.name, e.value)
"""

Install = Callable[[Path], None]


def run(*command: object, **changes: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        env=startup.environment(**changes),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments: object) -> None:
    run(sys.executable, "-m", "pip", "--quiet", *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        path = CHECKOUT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, source)
    (path,) = folder.glob("atom_patches-*.whl")
    return path


class Environment:
    """A fresh virtual environment without pip."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.folder = folder
        self.python = folder / "bin" / "python"

    def pip(self, command: str, *arguments: object) -> None:
        """Run this environment's share of pip: installs and uninstalls, never dependencies."""
        run(sys.executable, "-m", "pip", "--quiet", "--python", self.python, command, *arguments)

    def files(self) -> set[str]:
        """Every file below the environment."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir()}


@pytest.fixture(params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> tuple[Environment, set[str]]:
    """An environment with the package in it, and the files that it had before."""
    environment = Environment(tmp_path / "env")
    before = environment.files()
    if request.param == "wheel":
        environment.pip("install", "--no-deps", request.getfixturevalue("wheel"))
    else:
        environment.pip("install", "--no-deps", "--editable", source)
    return environment, before


def test_the_wheel_contains_every_module_and_the_pth_file(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(source)) for path in (source / "atom_patches").rglob("*.py")}
    files = {str(path.relative_to(source)) for path in (source / "atom_patches").rglob("*") if path.is_file()}
    data = files - modules
    kinds = {Path(name).parts[1] + Path(name).suffix for name in data}
    assert kinds == {"vllm.json", "sglang.json", "kernels.json", "cli.txt"}
    assert modules | data | {"atom_patches_boot.py"} <= names
    assert [name for name in names if name.endswith(".pth")] == ["/".join([_data(names), "purelib/atom_patches.pth"])]


def _data(names: set[str]) -> str:
    (folder,) = {name.partition("/")[0] for name in names if ".data/" in name}
    return folder


def test_the_wheel_contains_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("/LICENSE") for name in names)
    ours = ("atom_patches/", "atom_patches_boot.py", "atom_patches-")
    assert [name for name in names if not name.startswith(ours)] == []


def test_an_install_arms_when_asked_and_leaves_nothing_behind(installed: tuple[Environment, set[str]]) -> None:
    environment, before = installed
    assert run(environment.python, "-c", ARMED) == "False\n"
    assert run(environment.python, "-c", ARMED, ATOM_PATCHES="1") == "True\n"
    assert run(environment.python, "-c", ENTRY_POINTS).splitlines() == [
        "console_scripts atom-patches atom_patches.__main__:main",
        "sglang.srt.plugins atom atom_patches_boot:sglang_plugin",
        "vllm.general_plugins atom atom_patches_boot:vllm_general_plugin",
        "vllm.platform_plugins atom atom_patches_boot:vllm_platform_plugin",
    ]

    environment.pip("uninstall", "--yes", "atom-patches")
    assert environment.files() == before
    assert run(environment.python, "-c", ARMED, ATOM_PATCHES="1") == "False\n"
