"""Several GPUs: their link, prefill context parallelism on vLLM, and data-parallel attention on SGLang.

    python benchmarks/two_gpu.py link --json link.json
    python benchmarks/two_gpu.py vllm --json vllm.json          # one layout after the other
    python benchmarks/two_gpu.py vllm --device cpu --size tiny --lengths 128 300 --chunk 128 --eager
    python benchmarks/two_gpu.py sglang --ranks 2 --json sglang.json        # two_gpu_sglang.py says what that is
    python benchmarks/two_gpu.py report link.json vllm.json sglang.json

`vllm` measures the time to the first token and decode steps, and compares tokens. Each layout is one start of vLLM with
a process a rank (external launcher). Modes change at run time: the settings are read for every step. Weights are seeded
(atom_patches/bench/seeded_model.py), prompts random.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import two_gpu_sglang

HERE = Path(__file__).parent
LAYOUTS = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "pcp2": {"prefill_context_parallel_size": 2},
    "pcp2 ep": {"prefill_context_parallel_size": 2, "enable_expert_parallel": True},
    "pcp2 whole experts": {"prefill_context_parallel_size": 2},
    "pcp2 cut experts": {"prefill_context_parallel_size": 2},
    # Not timed: shared prefixes are answered from the cache.
    "one cached": {"enable_prefix_caching": True},
    "pcp2 cached": {"prefill_context_parallel_size": 2, "enable_prefix_caching": True},
}
MODES = [
    "auto",
    *(f"{gdn}:{attention}" for gdn in ("redundant", "relay", "two_pass", "head_all_to_all")
      for attention in ("contiguous", "zigzag")),
]  # fmt: skip
ENVIRONMENT = {"pcp2 whole experts": {"ATOM_PCP_MOE": "replicate"}, "pcp2 cut experts": {"ATOM_PCP_MOE": "shard"}}


def main() -> None:
    """Run what was asked for."""
    options = _parser().parse_args()
    if options.command == "report":
        return report([json.loads(path.read_text()) for path in options.results])
    if options.command == "sglang":
        raise SystemExit(0 if two_gpu_sglang.report(two_gpu_sglang.main(options)) else 1)
    results = []
    for layout in options.layouts if options.command == "vllm" else ["link"]:
        started = time.monotonic()
        results.append({"layout": layout, **_run(options, layout), "seconds": round(time.monotonic() - started, 1)})
        options.json.write_text(json.dumps(results, indent=1))
        print(f"{layout}: {results[-1]['seconds']} s", flush=True)
    report([results])
    if any("failed" in result for result in results):
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("link", "vllm", "sglang"):
        command = commands.add_parser(name)
        command.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        command.add_argument("--json", type=Path, default=Path(f"{name}.json"))
        command.add_argument("--limit", type=float, default=400, help="seconds for one layout")
    two_gpu_sglang.add_options(command)
    command = commands.choices["vllm"]
    command.add_argument("--size", default="qwen35b", help="of seeded_model.SIZES")
    command.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["one", "pcp2", "tp2"])
    command.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536, 131072])
    command.add_argument("--chunk", type=int, default=4096, help="rows of a step where chunked prefill is compared")
    command.add_argument("--eager", action="store_true")
    command.add_argument("--modes", nargs="+", default=MODES, help="auto, or GDN:ATTENTION as the settings name them")
    command.add_argument("--trace", type=Path, help="a folder for each rank's timeline of one prefill of each length")
    commands.add_parser("report").add_argument("results", nargs="+", type=Path)
    return parser


def _run(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Start a process a rank and return what rank 0 found, as far as it came; `failed` says why it came no further."""
    ranks = 1 if layout.startswith("one") else 2
    with tempfile.TemporaryDirectory() as folder:
        plan = {**vars(options), "layout": layout, "options": LAYOUTS.get(layout, {}), "folder": folder}
        (Path(folder) / "plan.json").write_text(json.dumps(plan, default=str))
        port = _free_port()
        logs = [Path(folder) / f"log{rank}.txt" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, HERE / "two_gpu_rank.py", f"{folder}/plan.json"],
                env={**os.environ, **ENVIRONMENT.get(layout, {}), "RANK": str(rank), "LOCAL_RANK": str(rank),
                     "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                     "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "atom"},
                stdout=log.open("w"), stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        failed = _wait(processes, options.limit)
        result = Path(folder) / "result.json"
        found = json.loads(result.read_text()) if result.exists() else {}
        if failed:
            found["failed"] = f"ranks {failed} failed, or did not end in {options.limit:.0f} s"
            shown = "\n".join(f"--- rank {rank}\n{logs[rank].read_text()[-5000:]}" for rank in failed)
            print(f"{layout}: {found['failed']}\n{shown}", flush=True)
        return found


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> list[int]:
    """The ranks that failed first; all have ended."""
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed or time.monotonic() > deadline:
            for process in processes:
                process.kill()
                process.wait()
            return failed or list(range(len(processes)))
        time.sleep(0.1)
    return [rank for rank, process in enumerate(processes) if process.returncode]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def report(files: list[list[dict[str, Any]]]) -> None:
    """Print tables of what the files hold."""
    results = {result["layout"]: result for file in files for result in file}
    for row in results.get("link", {}).get("rows", []):
        print(f"{row['what']:15} {row['bytes']:>13,} B {row['seconds'] * 1e6:10.1f} us {row['rate'] / 1e9:7.1f} GB/s")
    for layout, result in results.items():
        one = results.get("one cached" if layout.endswith("cached") else "one", {})
        for mode in result.get("modes", []):
            against = one["modes"][0]["prefill"] if "modes" in one else {}
            cells = []
            for length, seconds in mode["prefill"].items():
                ratio = f" x{against[length] / seconds:.2f}" if length in against else ""
                cells.append(f"{int(length):,}: {seconds * 1e3:.1f} ms{ratio}")
            print(f"{layout:20} {mode['mode']:32} {'   '.join(cells)}")
        for batch, seconds in result.get("decode", {}).items():
            ratio = f" x{one['decode'][batch] / seconds:.2f}" if "decode" in one else ""
            print(f"{layout:20} decode of {batch:>3} {seconds * 1e3:24.3f} ms a step{ratio}")
        if result is not one and "answers" in one and "answers" in result:
            for name, answers in result["answers"].items():
                print(f"{layout:20} {name:32} {_difference(one['answers'][name.split(':')[0]], answers)}")
    two_gpu_sglang.report([result for layout, result in results.items() if layout.startswith("sglang ")])


def _difference(expected: list[Any], found: list[Any]) -> str:
    """How many prompts have equal tokens, and how far log-probabilities are apart up to where tokens part."""
    equal, worst, parted = 0, 0.0, []
    for one, other in zip(expected, found, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a["token"] != b["token"]), len(one))
        equal += same == len(one)
        worst = max([worst, *(abs(a["logprob"] - b["logprob"]) for a, b in zip(one[:same], other[:same], strict=True))])
        if same < len(one):
            parted.append(f"token {same}, best two {one[same]['margin']:.4f} apart")
    text = f"{equal} of {len(expected)} prompts equal, log-probabilities within {worst:.4f}"
    return text + (f"; parted: {'; '.join(parted)}" if parted else "")


if __name__ == "__main__":
    main()
