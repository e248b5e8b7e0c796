"""What being installed, and being armed, costs the start of a Python interpreter.

Prints one line per figure with its bound, and ends with a status of 1 if a bound is missed:

    python tools/startup.py [--pairs N]

Run it with the interpreter of an environment in which atom_patches is installed. Processor time is measured, and the
medians of armed and unarmed starts, taken in turn, are compared: what else the machine does changes neither much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

OURS = ("atom_patches", "atom_patches_boot")
HEAVY = ("torch", "vllm", "sglang", "wrapt", "logging", "inspect", "dataclasses", "importlib.metadata")
FORBIDDEN_WHEN_ARMED = ("torch", "vllm", "sglang")

PTH_BOUND_US = 50.0
ARMED_BOUND_MS = 100.0


class Figure(NamedTuple):
    """One measured line: what, what was found, what is required, and whether it holds."""

    what: str
    found: str
    required: str
    holds: bool


def pth_file() -> Path:
    """The installed `.pth` file of this interpreter."""
    path = Path(sysconfig.get_paths()["purelib"]) / "atom_patches.pth"
    if not path.exists():
        raise SystemExit(f"startup: {path} is missing; install the package into this environment first")
    return path


def environment(**changes: str) -> dict[str, str]:
    """This environment without any variable that arms, or that changes what an interpreter imports."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATOM", "PYTHON", "COV_"))}
    return kept | changes


def fresh_python(code: str, *options: str, **changes: str) -> str:
    """Run `code` in a fresh interpreter, away from the checkout, and return what it printed."""
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=environment(**changes),
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return result.stdout


def loaded(**changes: str) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter."""
    return set(json.loads(fresh_python("import sys, json; print(json.dumps(sorted(sys.modules)))", **changes)))


def ours(modules: set[str]) -> set[str]:
    """Those of `modules` that belong to this package."""
    return {name for name in modules if name.partition(".")[0] in OURS}


def pth_line_us(repeats: int = 1000) -> float:
    """Median time in microseconds that the `.pth` line takes in an unarmed process, compiled anew each time."""
    code = f"""
import json, os, statistics, time
line = open({str(pth_file())!r}).read()
times = []
for _ in range({repeats}):
    start = time.perf_counter_ns()
    exec(line)
    times.append(time.perf_counter_ns() - start)
print(statistics.median(times) / 1000)
"""
    return float(fresh_python(code))


def start_ms(**changes: str) -> float:
    """Processor time in milliseconds of a fresh interpreter that does nothing."""
    before = _children_seconds()
    fresh_python("pass", **changes)
    return (_children_seconds() - before) * 1000


def _children_seconds() -> float:
    """Processor time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def interleaved_ms(pairs: int) -> tuple[float, float]:
    """Medians of unarmed and armed starts in milliseconds, measured in turn."""
    start_ms()
    start_ms(ATOM_PATCHES="1")
    times = [(start_ms(), start_ms(ATOM_PATCHES="1")) for _ in range(pairs)]
    unarmed, armed = zip(*times, strict=True)
    return statistics.median(unarmed), statistics.median(armed)


def figures(pairs: int) -> list[Figure]:
    """Measure everything."""
    pth_file()
    unarmed, armed = loaded(), loaded(ATOM_PATCHES="1")
    line = pth_line_us()
    plain_ms, armed_ms = interleaved_ms(pairs)
    overhead = armed_ms - plain_ms
    dragged_in = sorted((armed - unarmed) & set(HEAVY))
    forbidden = sorted(armed & set(FORBIDDEN_WHEN_ARMED))
    return [
        Figure("unarmed: modules of ours", _names(ours(unarmed)), "none", not ours(unarmed)),
        Figure(
            "unarmed: the .pth line, median of 1,000",
            f"{line:.1f} us",
            f"< {PTH_BOUND_US:.0f} us",
            line < PTH_BOUND_US,
        ),
        Figure("armed, no engine: modules of ours", _names(ours(armed)), "some", bool(ours(armed))),
        Figure("armed, no engine: torch or an engine", _names(set(forbidden)), "none", not forbidden),
        Figure("armed, no engine: costly modules", _names(set(dragged_in)), "none", not dragged_in),
        Figure(
            f"armed: overhead of a fresh interpreter, {pairs} pairs",
            f"{armed_ms:.1f} - {plain_ms:.1f} = {overhead:.1f} ms",
            f"< {ARMED_BOUND_MS:.0f} ms",
            overhead < ARMED_BOUND_MS,
        ),
    ]


def _names(modules: set[str]) -> str:
    return ", ".join(sorted(modules)) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21, help="interleaved pairs of starts (default: 21)")
    measured = figures(parser.parse_args().pairs)
    for figure in measured:
        print(f"{'ok  ' if figure.holds else 'MISS'}  {figure.what:<52} {figure.found}   (required: {figure.required})")
    missed = sum(not figure.holds for figure in measured)
    print(f"startup: {len(measured) - missed}/{len(measured)} figures hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
