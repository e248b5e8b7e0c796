"""Measure the tile sizes of `fused_moe` on this machine's GPU, for one model's experts.

    python tools/tune_moe.py [--experts 256] [--intermediate 512] [--hidden 2048] [--top-k 8] [--dtype bfloat16]
                             [--tokens 1,4,16,64,...] [--jobs N] [--out FOLDER] [--compile-only]

Candidates are compiled by several processes into Triton's cache first. Then the two products are timed apart, for each
number of rows of a block, on weights that the second-level cache does not hold, and the best pairs are timed as a
whole: with and without the sort, and with and without the early start of the next kernel. The result goes to
`atom_patches/kernels/fused_moe/configs/<GPU>/`, or below FOLDER, and is used from then on. The last columns are the
engine's own kernel, where vLLM is installed, and the ratio to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
from compile_kernels import compiling_for  # noqa: E402
from torch import Tensor  # noqa: E402

from atom_patches.kernels.fused_moe import bench, reference, triton_impl, tuned  # noqa: E402
from atom_patches.kernels.fused_moe.tuned import Config, Shape, Tile  # noqa: E402

SHARED_MEMORY = {"cuda": 227 * 1024, "hip": 64 * 1024}
KEPT = 3
"""Best tiles of each product that are put together."""

EARLY_MUST_WIN = 1.01
"""How much the early start of kernels must gain to be taken."""

FINALISTS = 4
"""Best pairs of a batch that are timed as a whole."""

Arguments = tuple[Any, ...]


def row_counts(shape: Shape, tokens: int) -> tuple[int, ...]:
    """Rows of a block worth trying: about as many as an expert has, which is not more than the batch."""
    mean = tokens * shape.top_k / shape.experts
    if mean <= 12:
        return (16,)
    if mean <= 24:
        return (16, 32, 64)
    if mean <= 96:
        return (64, 128) if mean > 48 else (64,)
    return (128,)


def tiles(rows: int, shape: Shape, backend: str) -> Iterator[tuple[Tile, Tile]]:
    """Candidates for the first and the second product, side by side; the shorter list is filled up with its first."""
    first = [tile for tile in _tiles(rows, 2) if _fits(tile, rows, 2, shape, shape.intermediate, backend)]
    second = [tile for tile in _tiles(rows, 1) if _fits(tile, rows, 1, shape, shape.hidden, backend)]
    for i in range(max(len(first), len(second))):
        yield first[i] if i < len(first) else first[0], second[i] if i < len(second) else second[0]


def _tiles(rows: int, halves: int) -> Iterator[Tile]:
    if rows <= 32:
        depths = {64: (4, 6), 128: (3, 4, 5), 256: (2, 3, 4)}
        for n in (16, 32, 64) if halves == 2 else (32, 64, 128):
            for k, stages in depths.items():
                yield from (Tile(n, k, 4, stage) for stage in stages)
                if n == 64 * (3 - halves):
                    yield Tile(n, k, 8, stages[0])
                if n >= 64:
                    yield from (Tile(n, k, 4, stage, swap=True) for stage in stages)
                if k == 128:
                    yield from (Tile(n, k, 4, 3, group=group) for group in (8, 64))
        if halves == 1:
            for n, wide in ((32, 4), (32, 8), (64, 2), (64, 4), (64, 8), (128, 2), (128, 4)):
                for k, stages in ((64, (4, 6)), (128, (3, 4, 5)), (256, (2, 3, 4)), (512, (2, 3))):
                    if n * k <= 32 * 1024:
                        yield from (Tile(n, k, 4, stage, wide=wide) for stage in stages)
                    if n >= 64 and k <= 256:
                        yield from (Tile(n, k, 4, stage, swap=True, wide=wide) for stage in stages[:2])
        return
    for n in (64, 128) if halves == 2 else (64, 128, 256):
        for k in (64, 128):
            for warps in (4, 8):
                if n * halves * rows // (warps * 32) not in (32, 64, 128):
                    continue
                for stage in (3, 4) if k == 64 else (2, 3):
                    yield Tile(n, k, warps, stage)
                    if rows == 128:
                        yield Tile(n, k, warps, stage, halve=True)
                if k == 64:
                    yield Tile(n, k, warps, 3, group=8, halve=rows == 128)
                if halves == 1 and n > 64:
                    for wide in (2, 4, 8) if k == 64 else (2, 4):
                        for stage in (3, 4) if k == 64 else (2, 3):
                            yield Tile(n, k, warps, stage, halve=rows == 128, wide=wide)


def _fits(tile: Tile, rows: int, halves: int, shape: Shape, columns: int, backend: str) -> bool:
    deep = shape.hidden if halves == 2 else shape.intermediate
    size = shape.dtype.itemsize
    bytes = (tile.n * halves + rows) * tile.k * size * max(1, tile.stages - (backend == "hip"))
    columns //= tile.wide
    return (
        bytes <= SHARED_MEMORY[backend]
        and tile.k <= deep
        and tile.n <= columns
        and (backend != "hip" or tile.stages <= 3)
    )


def candidates(shape: Shape, tokens: int, backend: str) -> list[Config]:
    """Every configuration that is compiled for a batch of that size."""
    tables = not _may_search(shape, tokens)
    found = [tuned.default(shape, tokens, hip=backend == "hip", shared_memory=SHARED_MEMORY[backend])]
    for rows in row_counts(shape, tokens):
        for first, second in tiles(rows, shape, backend):
            found.append(Config(rows, tables, first, second))
    return found


def _may_search(shape: Shape, tokens: int) -> bool:
    return tokens * shape.top_k <= tuned.MOST_UNSORTED


def arguments(shape: Shape, tokens: int, device: torch.device, seed: int, weights: tuple[Tensor, Tensor]) -> Arguments:
    topk_weights, topk_ids = (t.to(device) for t in bench.routing(tokens, shape.experts, shape.top_k, seed))
    x = torch.empty(tokens, shape.hidden, device=device, dtype=shape.dtype)
    if device.type != "meta":
        x.normal_(generator=torch.Generator(device).manual_seed(seed))
    return x, *weights, topk_weights, topk_ids, None, None, None, None


class Job(NamedTuple):
    shape: Shape
    tokens: int
    config: Config
    target: str


def compile_job(job: Job) -> str:
    """Compile one configuration's kernels into the cache; a text if that does not work."""
    device = torch.device("meta")
    try:
        with compiling_for(job.target, []):
            weights = bench.weights(
                device, job.shape.experts, job.shape.intermediate, job.shape.hidden, job.shape.dtype
            )
            x, w13, w2, topk_weights, topk_ids, *_ = _meta(job, weights)
            triton_impl.run(x, w13, w2, topk_weights, topk_ids, None, None, None, None, job.config)
    except Exception as error:  # noqa: BLE001 - a candidate that does not compile is left out
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _meta(job: Job, weights: tuple[Tensor, Tensor]) -> Arguments:
    shape, tokens = job.shape, job.tokens
    chosen = torch.empty(tokens, shape.top_k, device="meta")
    x = torch.empty(tokens, shape.hidden, device="meta", dtype=shape.dtype)
    return x, *weights, chosen, chosen.int()


def compile_all(jobs: list[Job], processes: int) -> set[tuple[int, Config]]:
    """Compile in `processes` processes; returns what failed."""
    start = time.monotonic()
    failed: set[tuple[int, Config]] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done, (job, error) in enumerate(zip(jobs, pool.map(compile_job, jobs), strict=True), 1):
            if error:
                failed.add((job.tokens, job.config))
                print(f"  left out, rows {job.config.rows} {job.config.first} {job.config.second}: {error}")
            if done % 50 == 0 or done == len(jobs):
                print(f"  compiled {done} of {len(jobs)} configurations, {time.monotonic() - start:.0f} s", flush=True)
    return failed


def seconds(call: Callable[[int], Any], sets: int, repeats: int = 3) -> float:
    """Median time of call(i), captured for every set in one graph, so that its launches cost nothing."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / sets)
    return statistics.median(times[1:])


class Batch:
    """Calls with `tokens` tokens each, and what was found for them."""

    def __init__(self, shape: Shape, tokens: int, weights: tuple[Tensor, Tensor]) -> None:
        self.shape, self.tokens = shape, tokens
        self.backend = "cuda" if torch.version.hip is None else "hip"
        self.sets = max(2, min(16, 256 // max(1, tokens)))
        self.calls = [arguments(shape, tokens, weights[0].device, seed, weights) for seed in range(self.sets)]
        self.usual = tuned.default(shape, tokens, hip=self.backend == "hip", shared_memory=SHARED_MEMORY[self.backend])

    def finalists(self, failed: set[Config]) -> list[Config]:
        """The best tiles of the two products, put together, in every way to run them."""
        good: list[tuple[float, Config]] = []
        for rows in row_counts(self.shape, self.tokens):
            good += _pairs(self.shape, self.tokens, rows, self.calls, failed, self.backend)
        good.sort(key=lambda item: item[0])
        best = [config for _, config in good[:FINALISTS]]
        return [way for config in best for way in self._ways(config)]

    def _ways(self, config: Config) -> Iterator[Config]:
        early = self.backend == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
        for tables in (True, False) if _may_search(self.shape, self.tokens) else (True,):
            for ahead in (False, True) if early and self.tokens <= 1024 else (False,):
                yield replace(config, tables=tables, early=ahead)

    def decide(self, finalists: list[Config], engine: Any) -> dict[str, Any]:
        """Time the finalists; the best, with its time."""
        timed = [(self._whole(config), config) for config in (self.usual, *finalists)]
        usual = timed[0][0]
        timed.sort(key=lambda item: item[0] * (EARLY_MUST_WIN if item[1].early else 1.0))
        for time_, config in timed[:5]:
            print(f"    {1e6 * time_:8.1f} us {_described(config)}")
        time_, best = timed[0]
        _verify(best, self.calls[0])
        chosen = sum(call[4].unique().numel() for call in self.calls) / self.sets
        line = f"{self.tokens:6} tokens, {chosen:.0f} experts: {1e6 * time_:8.1f} us, default {1e6 * usual:8.1f}"
        entry: dict[str, Any] = {"config": best.as_json(), "us": round(1e6 * time_, 1)}
        if engine is not None:
            own = seconds(lambda i: engine.fused_moe(*self.calls[i]), self.sets, 7)
            entry["engine_us"] = round(1e6 * own, 1)
            line += f", engine {1e6 * own:8.1f}, {own / time_:.2f} x"
        print(f"{line}; {_described(best)}", flush=True)
        return entry

    def _whole(self, config: Config) -> float:
        return seconds(lambda i: triton_impl.run(*self.calls[i], config=config), self.sets, 7)


def _pairs(
    shape: Shape, tokens: int, rows: int, calls: list[Arguments], failed: set[Config], backend: str
) -> list[tuple[float, Config]]:
    """The best tiles of the two products, put together, with the sum of their times."""
    sets, tables = len(calls), not _may_search(shape, tokens)
    options = [c for c in candidates(shape, tokens, backend)[1:] if c.rows == rows and c not in failed]
    plans = [
        triton_impl.planned(call[0], call[1], call[2], call[4], None, None, replace(options[0], tables=tables))
        for call in calls
    ]

    def first(tile: Tile, i: int) -> Tensor:
        x, w13 = calls[i][:2]
        return triton_impl.gate_up(plans[i], x, w13, None, Config(rows, tables, tile, tile))

    firsts = _ranked((option.first for option in options), first, sets)
    between = [first(firsts[0][1], i) for i in range(sets)]

    def second(tile: Tile, i: int) -> Tensor:
        call = calls[i]
        return triton_impl.down(plans[i], between[i], call[2], None, call[3], Config(rows, tables, tile, tile))

    others = _ranked((option.second for option in options), second, sets)
    for name, ranked in (("first", firsts), ("second", others)):
        best = ", ".join(f"{1e6 * t:.1f} us {_short(tile)}" for t, tile in ranked[:6])
        print(f"  rows {rows}, {name}: {best} ... {1e6 * ranked[-1][0]:.1f} us {_short(ranked[-1][1])}", flush=True)
    return [(a + b, Config(rows, tables, one, two)) for a, one in firsts[:KEPT] for b, two in others[:KEPT]]


def _ranked(tiles: Iterable[Tile], call: Callable[[Tile, int], Any], sets: int) -> list[tuple[float, Tile]]:
    found: list[tuple[float, Tile]] = []
    for tile in dict.fromkeys(tiles):
        try:
            found.append((seconds(lambda i, tile=tile: call(tile, i), sets), tile))
        except Exception as error:  # noqa: BLE001 - too much shared memory, say: not a candidate here
            print(f"  left out {_short(tile)}: {type(error).__name__}: {error}")
    return sorted(found, key=lambda item: item[0])


def _verify(config: Config, call: Arguments) -> None:
    """The configuration computes what the plainest one computes; the reference is for the tests."""
    few = min(256, call[0].shape[0])
    got = triton_impl.run(*call, config=config)[:few].float()
    part = (call[0][:few], call[1], call[2], call[3][:few], call[4][:few])
    want = reference.fused_moe(*part, None, None, None, None).float()
    if not torch.allclose(got, want, rtol=0.03, atol=0.03):
        raise SystemExit(f"{config} computes something else: {(got - want).abs().max()}")


def _short(tile: Tile) -> str:
    extras = (" swap" if tile.swap else "") + (" halve" if tile.halve else "")
    extras += (f" g{tile.group}" if tile.group > 1 else "") + (f" wide{tile.wide}" if tile.wide > 1 else "")
    return f"{tile.n}x{tile.k} w{tile.warps} s{tile.stages}{extras}"


def _described(config: Config) -> str:
    flags = ("" if config.tables else " unsorted") + (" early" if config.early else "")
    return f"rows {config.rows}{flags}, {_short(config.first)}, {_short(config.second)}"


def target() -> str:
    if torch.version.hip is not None:
        return f"hip:{torch.cuda.get_device_properties(0).gcnArchName.partition(':')[0]}"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda:{major}{minor}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=bench.EXPERTS)
    parser.add_argument("--intermediate", type=int, default=bench.WIDTH)
    parser.add_argument("--hidden", type=int, default=bench.HIDDEN)
    parser.add_argument("--top-k", type=int, default=bench.TOP_K)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--tokens", default="1,4,16,64,128,256,512,1024,2048,4096,16384")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=tuned.CONFIGS)
    parser.add_argument("--compile-only", action="store_true", help="for compute capability 9 where there is no GPU")
    options = parser.parse_args()
    start = time.monotonic()
    shape = Shape(options.experts, options.intermediate, options.hidden, options.top_k, getattr(torch, options.dtype))
    counts = [int(text) for text in options.tokens.split(",")]
    aim = "cuda:90" if options.compile_only else target()
    backend = aim.partition(":")[0]
    jobs = [Job(shape, tokens, config, aim) for tokens in counts for config in candidates(shape, tokens, backend)]
    jobs = list(_distinct(jobs))
    print(f"{shape.file}: {len(jobs)} configurations to compile for {aim}, {options.jobs} processes", flush=True)
    failed = compile_all(jobs, options.jobs)
    if options.compile_only:
        return 1 if failed else 0

    device = torch.device("cuda")
    gpu = torch.cuda.get_device_name(device)
    engine = (
        importlib.import_module("atom_patches.vllm.kernels.fused_moe") if importlib.util.find_spec("vllm") else None
    )
    weights = bench.weights(device, shape.experts, shape.intermediate, shape.hidden, shape.dtype)
    batches = [Batch(shape, tokens, weights) for tokens in counts]
    out_of = {config for _, config in failed}
    finalists = {}
    for batch in batches:
        print(f"{batch.tokens} tokens, {time.monotonic() - start:.0f} s", flush=True)
        finalists[batch.tokens] = batch.finalists(out_of)
    jobs = [Job(shape, tokens, config, aim) for tokens, configs in finalists.items() for config in configs]
    failed = compile_all(list(_distinct(jobs)), options.jobs)
    found = {}
    for batch in batches:
        left = [c for c in finalists[batch.tokens] if (batch.tokens, c) not in failed]
        found[str(batch.tokens)] = batch.decide(left, engine)
    path = options.out / gpu.replace(" ", "_") / shape.file
    path.parent.mkdir(parents=True, exist_ok=True)
    before = tuned.CONFIGS / gpu.replace(" ", "_") / shape.file
    if before.is_file():  # other batches keep what was measured for them
        found = json.loads(before.read_text(encoding="utf-8"))["tokens"] | found
    found = {count: found[count] for count in sorted(found, key=int)}
    versions = {"gpu": gpu, "triton": importlib.import_module("triton").__version__, "torch": torch.__version__}
    path.write_text(json.dumps(versions | {"tokens": found}, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {time.monotonic() - start:.0f} s in all")
    return 0


def _distinct(jobs: list[Job]) -> Iterator[Job]:
    """Leave out what another batch's job compiles: kernels do not depend on the number of tokens, but for these."""
    seen: set[tuple[Any, ...]] = set()
    for job in jobs:
        pairs = job.tokens * job.shape.top_k
        unsorted = 0 if job.config.tables else max(64, 1 << (pairs - 1).bit_length())
        narrow = pairs * job.shape.hidden <= triton_impl.FLOAT_PARTS
        key = (job.config, unsorted, narrow, pairs <= triton_impl.COUNTED)
        if key not in seen:
            seen.add(key)
            yield job


if __name__ == "__main__":
    sys.exit(main())
