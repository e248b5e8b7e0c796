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
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
#: Files by which a rank says that it has started, and is told to measure.
READY, TURN = "ready", "turn"
#: Of a layout's time, where several start side by side: who is late would have the others measure nothing.
TO_START = 0.7
ENVIRONMENT = {"pcp2 whole experts": {"ATOM_PCP_MOE": "replicate"}, "pcp2 cut experts": {"ATOM_PCP_MOE": "shard"}}


def main() -> None:
    """Run what was asked for."""
    options = _parser().parse_args()
    if getattr(options, "together", False) and options.device == "cuda" and options.cache_gib is None:
        raise SystemExit("--together: several engines share each GPU, so say with --cache-gib what one may take")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that ranks are ended on the way out
    if options.command == "report":
        return report([json.loads(path.read_text()) for path in options.results])
    if options.command == "sglang":
        raise SystemExit(0 if two_gpu_sglang.report(two_gpu_sglang.main(options)) else 1)
    results: list[dict[str, Any]] = []
    for result in _results(options):
        results.append(result)
        options.json.write_text(json.dumps(results, indent=1))
        print(f"{result['layout']}: {result['seconds']} s", flush=True)
    report([results])
    if any("failed" in result for result in results):
        raise SystemExit(1)


def _results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What each layout's rank 0 found."""
    layouts = options.layouts if options.command == "vllm" else ["link"]
    together = options.command == "vllm" and options.together
    with ExitStack() as stack:
        started = [stack.enter_context(_started(options, layout)) for layout in layouts if together]
        for one in started:
            one.start_until(options.limit * TO_START)
        for one in started:
            yield one.measured()
        for layout in [] if together else layouts:
            with _started(options, layout) as one:
                yield one.measured()


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
    command.add_argument("--cache-gib", type=int, help="of each GPU; else what it has left, and nobody else may use it")
    command.add_argument("--together", action="store_true", help="start all layouts at once; needs --cache-gib")
    command.add_argument("--trace", type=Path, help="a folder for each rank's timeline of one prefill of each length")
    commands.add_parser("report").add_argument("results", nargs="+", type=Path)
    return parser


@dataclass
class Running:
    """A layout's ranks. They start, say that they are ready, and measure when it is their turn."""

    layout: str
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    deadline: float
    since: float = field(default_factory=time.monotonic)
    ready: float = field(default_factory=time.monotonic)

    def measured(self) -> dict[str, Any]:
        """What rank 0 found, as far as it came; `failed` says why it came no further."""
        waited = time.monotonic() - self.ready  # for others, which takes nothing of its own time
        self.deadline += waited
        (self.folder / TURN).touch()
        failed = self.wait(lambda: False)
        result = self.folder / "result.json"
        found = {"layout": self.layout, **(json.loads(result.read_text()) if result.exists() else {})}
        found["seconds"] = round(time.monotonic() - self.since - waited, 1)
        if failed:
            found["failed"] = f"ranks {failed} failed, or did not end in time"
            shown = "\n".join(f"--- rank {rank}\n{self.log(rank).read_text()[-5000:]}" for rank in failed)
            print(f"{self.layout}: {found['failed']}\n{shown}", flush=True)
        return found

    def start_until(self, seconds: float) -> None:
        """Wait until all ranks are ready; they are ended if that takes longer."""
        late = self.since + seconds
        self.wait(lambda: self._is_ready() or time.monotonic() > late)
        if not self._is_ready():
            self.end()
        self.ready = time.monotonic()

    def _is_ready(self) -> bool:
        return all((self.folder / f"{READY}{rank}").exists() for rank in range(len(self.processes)))

    def wait(self, enough: Callable[[], bool]) -> list[int]:
        """Wait for that, or for the end; the ranks that failed first, of which then none is left."""
        while not enough() and any(process.poll() is None for process in self.processes):
            failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
            if failed or time.monotonic() > self.deadline:
                self.end()
                return failed or list(range(len(self.processes)))
            time.sleep(0.1)
        return [rank for rank, process in enumerate(self.processes) if process.poll()]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, rank: int) -> Path:
        return self.folder / f"log{rank}.txt"


@contextmanager
def _started(options: argparse.Namespace, layout: str) -> Iterator[Running]:
    """Start a process a rank; they are ended with the block."""
    ranks = 1 if layout.startswith("one") else 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = {**vars(options), "layout": layout, "options": LAYOUTS.get(layout, {}), "folder": name,
                "ready": READY, "turn": TURN}  # fmt: skip
        (folder / "plan.json").write_text(json.dumps(plan, default=str))
        running = Running(layout, folder, [], time.monotonic() + options.limit)
        shared = {
            **os.environ, **ENVIRONMENT.get(layout, {}), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "atom",
        }  # fmt: skip
        try:
            for rank in range(ranks):
                with running.log(rank).open("w") as log:
                    command = [sys.executable, HERE / "two_gpu_rank.py", folder / "plan.json"]
                    own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    running.processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            yield running
        finally:
            running.end()


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
