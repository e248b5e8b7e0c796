"""Build the environment of one engine, or of the documentation, and join this checkout to it.

    python3 tools/build_env.py vllm-0.20.2

The packages of envs/NAME.txt go into a base environment in the user's cache, named by the hash of what made it and
shared by all checkouts. The checkout itself is installed, editable, into a thin environment of its own,
.venv/NAME, which reads everything else from the base: two checkouts never see each other's code.
Where there is envs/NAME.toml instead, the base is another release's, and this one's Python files are laid over it
(tools/stand_in.py).
Prints the thin environment's interpreter as its last line. Does nothing when all is there.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cuda_stubs
import stand_in
from toolcache import ROOT, cache_root, content_hash, locked

PYTHON = (3, 11)
INSTALL = ("install", "--no-deps", "--only-binary=:all:")
MARKER = "complete"
TICK_S = 10.0


def say(text: str) -> None:
    print(f"env: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> None:
    say(text)
    raise SystemExit(1)


def lock_of(name: str) -> Path:
    """The file with an environment's packages."""
    return ROOT / "envs" / f"{name}.txt"


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"


def check_machine(name: str) -> None:
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info[:2] != PYTHON:
        fail(f"the lock files are for Python {PYTHON[0]}.{PYTHON[1]}, this is {found} ({sys.executable}); "
             f"name the right one: make PYTHON=python{PYTHON[0]}.{PYTHON[1]} env")  # fmt: skip
    if platform.machine() != "x86_64" or sys.platform != "linux":
        fail(f"the lock files are for x86-64 Linux, this is {platform.machine()} {sys.platform}")
    for tool in ("gcc", "readelf"):
        if shutil.which(tool) is None:
            fail(f"{tool} is not installed; install gcc and binutils")
    if name.startswith("vllm"):
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            fail("libnuma.so.1, which vLLM's operators for the CPU need, is not installed; install libnuma1")


@contextmanager
def ticking(packages: int, into: Path) -> Iterator[None]:
    """Say every few seconds how many of the packages are installed: none while pip still fetches."""
    done = threading.Event()
    started = time.monotonic()

    def tick() -> None:
        while not done.wait(TICK_S):
            installed = len(list(into.glob("*.dist-info"))) - 1  # pip is there from the start
            phase = f"{installed} of {packages} installed" if installed > 1 else "fetching"
            say(f"{time.monotonic() - started:.0f} s: {phase}")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_pip(arguments: Sequence[str], log: Path) -> None:
    command = [*arguments, "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
    if code != 0:
        # pip repeats, for every package, which of the user's own locations it skipped.
        lines = [line for line in log.read_text(errors="replace").splitlines() if "WARNING: Location" not in line]
        print("\n".join(lines[-30:]), file=sys.stderr)
        fail(f"pip failed with status {code}; the whole log is {log}")


def build_base(name: str, lock: Path) -> Path:
    """The base environment's directory; building one with an engine takes about two minutes the first time."""
    made_of = content_hash([lock, Path(cuda_stubs.__file__)], platform.python_version(), *INSTALL)
    base = cache_root() / "envs" / f"{name}-{made_of}"
    if (base / MARKER).exists():
        return base
    with locked(base.with_name(base.name + ".lock")):
        if (base / MARKER).exists():
            return base
        started = time.monotonic()
        packages = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
        has_engine = any(line.startswith("torch==") for line in packages)
        say(f"building {base} (once; about {'2 minutes, 3.4 GB' if has_engine else '20 seconds, 0.2 GB'})")
        if base.exists():
            say("an earlier build was cut short: starting over")
            shutil.rmtree(base)
        base.parent.mkdir(parents=True, exist_ok=True)
        venv.create(base, with_pip=True)
        pip = [str(base / "bin" / "python"), "-m", "pip"]
        with ticking(len(packages), site_packages(base)):
            run_pip([*pip, *INSTALL, "-r", str(lock)], base.with_name(base.name + ".log"))
        if has_engine:
            say(f"stand-ins for {len(cuda_stubs.main(site_packages(base)))} CUDA libraries")
            subprocess.run([str(base / "bin" / "python"), "-c", "import torch, torchvision"], check=True)
        (base / MARKER).write_text(f"{time.monotonic() - started:.0f} s\n")
        say(f"built in {time.monotonic() - started:.0f} s")
    return base


def join_checkout(name: str, base: Path, over: Sequence[Path] = ()) -> Path:
    """The thin environment's interpreter; made anew when the base or the packaging of the checkout changed.

    Args:
        name: of the environment.
        base: the base environment.
        over: folders whose packages come before the base's.
    """
    packaging = [ROOT / name for name in ("setup.py", "pyproject.toml", "atom_patches.pth")]
    source = (ROOT / "atom_patches" / "__init__.py").read_text()
    version = next(line for line in source.splitlines() if line.startswith("__version__"))
    made_of = content_hash([*packaging, Path(__file__)], str(base), str(ROOT), version, *map(str, over))
    thin = ROOT / ".venv" / name
    marker = thin / MARKER
    python = thin / "bin" / "python"
    with locked(ROOT / ".venv" / f"{name}.lock"):
        if marker.exists() and marker.read_text() == made_of:
            return python
        # Renewed in place: a test run that goes on in this checkout keeps its interpreter.
        marker.unlink(missing_ok=True)
        venv.create(thin, with_pip=False)
        # Named to be read before the other .pth files: ours may import what lies in the base.
        lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in (*over, site_packages(base))]
        (site_packages(thin) / "0-base.pth").write_text("".join(lines))
        pip = [str(base / "bin" / "python"), "-m", "pip", "--python", str(python)]
        editable = [*pip, "install", "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)]
        run_pip(editable, thin / "install.log")
        marker.write_text(made_of)
        say(f"this checkout is installed in {thin.relative_to(ROOT)}")
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a file's name in envs/, without .txt or .toml")
    name: str = parser.parse_args().name
    release = stand_in.declared(name)
    below = name if release is None else release.over
    lock = lock_of(below)
    if not lock.exists():
        known = sorted(path.stem for kind in ("*.txt", "*.toml") for path in lock.parent.glob(kind))
        fail(f"no {lock}; known: {', '.join(known)}")
    check_machine(name)
    # The installer must not be steered by the environment of whoever runs it.
    for variable in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        os.environ.pop(variable, None)
    base = build_base(below, lock)
    over = [] if release is None else [stand_in.layer(name, release, site_packages(base))]
    print(join_checkout(name, base, over))


if __name__ == "__main__":
    main()
