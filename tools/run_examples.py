"""Run the examples that this environment can run, and compare what they print with what they say that they print.

    python tools/run_examples.py              # `make examples` does, with both engines
    python tools/run_examples.py notebook     # those whose name contains this

An example's docstring ends with the lines that it prints, indented. `…` stands for any text within a line, and a line
`…` of its own for any lines more.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
LIMIT_S = 600


class Example(NamedTuple):
    """A script in examples/, and the engine that it needs."""

    file: str
    engine: str | None = None


EXAMPLES = (
    Example("own_package/run.py"),
    Example("notebook.py", "vllm"),
    Example("serve_hybrid_pcp.py", "vllm"),
    Example("offline_models.py", "vllm"),
    Example("serve_models.py", "vllm"),
    Example("serve_models.py", "sglang"),
    Example("dp_attention.py", "sglang"),
    Example("sparse_mla.py", "sglang"),
)


def promised(text: str) -> list[str]:
    """The last indented lines of a script's docstring: what it says that it prints."""
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    start = max(number for number, line in enumerate(lines) if line and not line.startswith(" ")) + 1
    return [line.removeprefix("    ") for line in lines[start:] if line.strip()]


def difference(expected: list[str], printed: list[str]) -> str:
    """The first line that is not as promised; empty if there is none."""
    rest = list(printed)
    for number, line in enumerate(expected):
        if line == "…":
            return "" if number == len(expected) - 1 else f"line {number + 1}: … may only be the last line"
        if not rest:
            return f"line {number + 1} is missing: {line}"
        found = rest.pop(0)
        pattern = "*".join(_literal(part) for part in line.split("…"))
        if not fnmatch.fnmatchcase(found, pattern):
            return f"line {number + 1} is\n  {found}\nand should be\n  {line}"
    return f"one line more: {rest[0]}" if rest else ""


def _literal(text: str) -> str:
    """A pattern that matches this text only."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in text)


def run(example: Example) -> str:
    """Run one; empty if it printed what it promised."""
    path = FOLDER / example.file
    command = [sys.executable, str(path)]
    pipe = subprocess.PIPE
    ran = subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        printed, said = ran.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(ran.pid, signal.SIGKILL)  # with the processes that it started
        printed, said = ran.communicate()
        return f"not done after {LIMIT_S} s\n{printed}{said[-4000:]}"
    if ran.returncode:
        return f"exit status {ran.returncode}\n{printed}{said[-4000:]}"
    return difference(promised(path.read_text(encoding="utf-8")), printed.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="run those whose name contains it")
    name: str = parser.parse_args().name
    failed = False
    for example in EXAMPLES:
        if name not in example.file:
            continue
        if example.engine is not None and importlib.util.find_spec(example.engine) is None:
            print(f"examples/{example.file}: needs {example.engine}, which is not in this environment")
            continue
        started = time.monotonic()
        wrong = run(example)
        failed |= bool(wrong)
        print(f"examples/{example.file}: {wrong or f'as it says, {time.monotonic() - started:.0f} s'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
