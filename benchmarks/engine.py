"""vLLM's own model and the ATOM decoder side by side: decode steps, prefills, answers, and where GPU time goes.

    python benchmarks/engine.py --json engine.json                       # on a GPU
    python benchmarks/engine.py --device cpu --size tiny --batches 1 2 --lengths 128 --steps 4

Both engines are started at the same time, with the same options and seeded weights, on the same GPU; then they are
measured in turn, cell by cell, while the other one waits. `ratio` is stock's time over ATOM's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIDES = {"stock": {"ATOM_MODELS": "0"}, "atom": {"ATOM_MODELS": "1", "ATOM_PATCH_VLLM_MODELS": "1"}}


def main() -> None:
    """Measure, print, and write what was found as far as it came."""
    options = _parser().parse_args()
    started = time.monotonic()
    found: dict[str, Any] = {"cells": [], "options": {key: str(value) for key, value in vars(options).items()}}
    with tempfile.TemporaryDirectory() as folder:
        sides = {side: _start(side, Path(folder), options) for side in options.sides}
        try:
            for side, (process, connection, log) in sides.items():
                found[side] = _receive(process, connection, log, options.limit)
                print(f"{side}: started after {time.monotonic() - started:.0f} s: {found[side]}", flush=True)
            for cell in _cells(options):
                answers = {side: _ask(process, connection, log, cell, options.limit)
                           for side, (process, connection, log) in sides.items()}  # fmt: skip
                found["cells"].append({**cell, **answers})
                print(f"[{time.monotonic() - started:.0f} s] {_line(cell, answers)}", flush=True)
                options.json.write_text(json.dumps(found, indent=1))
        finally:
            for process, listener, _ in sides.values():
                process.kill()
                process.wait()
                listener.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="qwen35b", help="of seeded_model.SIZES")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--steps", type=int, default=48, help="decode steps that are timed in each round")
    parser.add_argument("--rounds", type=int, default=3, help="how often the sides take turns")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--profile", action="store_true", help="also the GPU time of each kernel")
    parser.add_argument("--json", type=Path, default=Path("engine.json"))
    parser.add_argument("--cache", type=Path, help="vLLM's cache directory, if not its default")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a start, and for a cell")
    return parser


def _cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = [{"what": "answers", "lengths": [5, 150, *options.lengths[:1]]}]
    for _ in range(options.rounds):
        cells += [{"what": "decode", "size": batch, "steps": options.steps} for batch in options.batches]
        cells += [{"what": "prefill", "size": length, "steps": 3} for length in options.lengths]
    if options.profile:
        cells += [{"what": "profile decode", "size": batch, "steps": 8} for batch in options.batches]
        cells += [{"what": "profile prefill", "size": length, "steps": 1} for length in options.lengths]
    return cells


def _start(side: str, folder: Path, options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Listener, Path]:
    listener = Listener(str(folder / side), "AF_UNIX")
    log = options.json.with_suffix(f".{side}.log")
    plan = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    arguments = json.dumps({**plan, "address": str(folder / side), "folder": str(folder / f"model {side}")})
    process = subprocess.Popen(
        [sys.executable, HERE / "engine_side.py", arguments],
        env={**os.environ, "VLLM_PLUGINS": "atom", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **SIDES[side],
             **({"VLLM_CACHE_ROOT": str(options.cache)} if options.cache else {})},
        stdout=log.open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    return process, listener, log


_connections: dict[int, Connection] = {}


def _receive(process: subprocess.Popen[bytes], listener: Listener, log: Path, limit: float) -> Any:
    """What a side says next.

    Raises:
        SystemExit: it ended, or says nothing in time.
    """
    connection = _connections.get(process.pid)
    deadline = time.monotonic() + limit
    if connection is None:
        listener._listener._socket.settimeout(1)  # pyright: ignore[reportAttributeAccessIssue]
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if connection is None:
            try:
                connection = _connections[process.pid] = listener.accept()
            except TimeoutError:
                continue
        if connection.poll(1):
            return json.loads(connection.recv_bytes())
    raise SystemExit(f"{log.name}: the engine ended ({process.poll()}) or took too long\n{log.read_text()[-5000:]}")


def _ask(process: subprocess.Popen[bytes], listener: Listener, log: Path, cell: dict[str, Any], limit: float) -> Any:
    _connections[process.pid].send_bytes(json.dumps(cell).encode())
    return _receive(process, listener, log, limit)


def _line(cell: dict[str, Any], answers: dict[str, Any]) -> str:
    name = f"{cell['what']} {cell.get('size', '')}"
    if cell["what"] == "answers":
        return f"{name}: {_compared(answers)}"
    if cell["what"].startswith("profile"):
        return f"{name}: " + "".join(f"\n  {side}: {_table(rows)}" for side, rows in answers.items())
    times = {side: statistics.median(spans) for side, spans in answers.items()}
    said = ", ".join(f"{side} {1000 * seconds:.3f} ms" for side, seconds in times.items())
    return f"{name}: {said}" + (f", ratio {times['stock'] / times['atom']:.3f}" if len(times) == 2 else "")


def _compared(answers: dict[str, Any]) -> str:
    if len(answers) < 2:
        return "one side only"
    apart, equal = [], 0
    for stock, atom in zip(answers["stock"], answers["atom"], strict=True):
        same = 0
        for one, other in zip(stock, atom, strict=True):
            if one[0] != other[0]:
                break
            apart.append(abs(one[1] - other[1]))
            same += 1
        equal += same
    total = sum(map(len, answers["stock"]))
    worst = max(apart, default=0)
    return f"{equal} of {total} tokens before answers part; log-probabilities apart by {worst:.4f} at most"


def _table(found: dict[str, Any]) -> str:
    rows = "".join(f"\n    {us:9.1f} us {count:4} x {name[:90]}" for name, us, count in found["kernels"][:22])
    return f"{found['gpu_us']:.0f} us of kernels, {found['launched']:.0f} of them{rows}"


if __name__ == "__main__":
    main()
