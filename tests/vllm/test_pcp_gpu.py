"""Prefill context parallelism on GPUs: ranks that share one, in eager mode and compiled; two with CUDA graphs.

The launches that the selected tests need run at the same time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import train_recall

from tests.vllm.gdn_oracle import ROOT
from tests.vllm.gpu_engines import (
    COMPILED,
    DENSE,
    GPUS,
    GRAPHS,
    HYBRID,
    MOE,
    REHEARSAL,
    Engine,
    Outcome,
    engine,
    hybrid_waves,
    launch,
    scored,
    shared_prefixes,
    wave,
)
from tests.vllm.pcp_engines import request
from tests.vllm.pcp_waves import STAGGERED
from tests.vllm.rounding import Distance, distance

pytestmark = pytest.mark.skipif(not REHEARSAL and GPUS < 1, reason="needs an NVIDIA GPU, and torch finds none")
two_gpus = pytest.mark.skipif(not REHEARSAL and GPUS < 2, reason=f"needs two NVIDIA GPUs, and torch finds {GPUS}")

#: How far rounding to bfloat16 moves log-probabilities of these models, at most and on average. Logits of 4 to 8 have
#: steps of 2**-5 themselves. Seen on the CPU: 0.09 and 0.016. With a fault put in, at least 0.7 and 0.046: the other
#: ranks' keys and values lost 1.1 and 0.14, the state before a rank's rows 3.2 and 0.12, the convolution's inputs
#: before a cut 0.9 and 0.046, final states 2.1 and 0.08.
WORST, MEAN = 0.25, 0.03
#: How much coarser with values in FP8. A difference of bfloat16's size, 2**-8, takes one of 2**5 values over to the
#: next of FP8, 2**-3 away: 2**-5.5 on average, 5.6 times as much. With the cache that happens in two of a hybrid's
#: sixteen blocks, 2.2 times over all; with weights in all, where a matrix product's rows change its bits.
IN_FP8 = {"fp8 cache": 2.5, "fp8 weights": 4.0}

RECALL_MODEL = ROOT / "tests" / "assets" / "recall"
_random = random.Random(5)
RECALL = [train_recall.make_prompt(train_recall.STAGES[-1], _random) for _ in range(8)]

#: Steps that mix prompts, chunks and decodes: the first of GRAPH_WAVES.
MIXED = [wave(scored(50), "two_pass", "zigzag"), wave(STAGGERED)]
DENSE_WAVES = [wave(scored(50), attention="zigzag"), wave(scored(51), attention="contiguous"), wave(STAGGERED)]
#: The same, for workers in other processes, which read what their engine was started with.
GRAPH_WAVES = [wave(scored(50)), wave(STAGGERED), *shared_prefixes("auto", "auto")]


#: What the model is asked that answers by what stands far back in its prompt: its margins are far above bfloat16's
#: rounding. Long prompts come in several steps.
ASKED = [request(tuple(p.tokens), max_tokens=len(p.answer)) for p in RECALL]
SMALL_GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 32, 128]}}
RECALL_OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 128, "enable_prefix_caching": False}


#: With this package's decoder on every rank.
ATOM = {"ATOM_MODELS": "1", "ATOM_PCP_MOE": "replicate"}


def recall(heads_divide: bool) -> Engine:
    by_heads = "head_all_to_all" if heads_divide else "auto"
    waves = [wave(ASKED, "relay", "contiguous"), wave(ASKED, "two_pass", "zigzag"), wave(ASKED, by_heads, "zigzag")]
    return engine(RECALL_MODEL, waves, **RECALL_OPTIONS)


def eager_of_full_size(ranks: int) -> dict[str, Engine]:
    """Engines with heads as large as the published models have. Key heads can be dealt out over two ranks, not four."""
    engines = {"hybrid": engine(HYBRID, hybrid_waves(heads_divide=ranks < 4))}
    if ranks < 4:
        replicate = {"ATOM_PCP_MOE": "replicate"}
        engines |= {
            "dense": engine(DENSE, DENSE_WAVES),
            "atom": engine(HYBRID, MIXED, env=ATOM),
            "triton replicate": engine(HYBRID, MIXED, "TRITON_ATTN", env=replicate),
            # Its queries move as FP8. A block of this cache has more tokens than a step, which prefix caching refuses.
            "fp8 cache": engine(HYBRID, MIXED, kv_cache_dtype="fp8", enable_prefix_caching=False),
        }
    return engines


def eager_of_small_size(ranks: int) -> dict[str, Engine]:
    """Engines whose kernels are other ones, by the size of their heads."""
    engines = {"recall": recall(heads_divide=ranks < 4)}
    if ranks < 4:
        engines["experts"] = engine(MOE, MIXED, enable_expert_parallel=True, language_model_only=True)
        engines["fp8 weights"] = engine(DENSE, DENSE_WAVES, quantization="fp8")
    return engines


def compiled() -> dict[str, Engine]:
    return {"hybrid": engine(HYBRID, MIXED, **COMPILED), "atom": engine(HYBRID, MIXED, env=ATOM, **COMPILED)}


def stock() -> dict[str, Engine]:
    """One rank as vLLM runs it by default, compiled and with graphs; what engines of two GPUs are compared with."""
    options: dict[str, Any] = {**GRAPHS, "distributed_executor_backend": "uni", "async_scheduling": True}
    return {
        "hybrid": engine(HYBRID, GRAPH_WAVES, counts_graphs=True, **options),
        "dense": engine(DENSE, GRAPH_WAVES, counts_graphs=True, **options),
    }


def on_two_gpus() -> dict[str, Engine]:
    """vLLM's own worker processes, NCCL, and everything that is on by default."""
    options: dict[str, Any] = {
        **GRAPHS,
        "distributed_executor_backend": "mp",
        "async_scheduling": True,
        "prefill_context_parallel_size": 2,
    }
    hybrid = {"ATOM_PCP_GDN": "two_pass", "ATOM_PCP_ATTENTION": "zigzag"}
    return {
        "hybrid": engine(HYBRID, GRAPH_WAVES, env=hybrid, counts_graphs=True, **options),
        "dense": engine(DENSE, GRAPH_WAVES, counts_graphs=True, **options),
        "recall": engine(RECALL_MODEL, [wave(ASKED)], env=hybrid, **{**options, **RECALL_OPTIONS, **SMALL_GRAPHS}),
    }


@dataclass(frozen=True)
class Launch:
    """Engines that follow each other in the same processes, one for each of `ranks`."""

    engines: Callable[[], dict[str, Engine]]
    ranks: int = 1
    compiles: bool = False


def eager(ranks: int) -> list[Launch]:
    """Kernels of one size are compiled while those of the other are."""
    return [Launch(partial(make, ranks), ranks) for make in (eager_of_full_size, eager_of_small_size)]


#: By the fixture that has their outcome.
LAUNCHES: dict[str, list[Launch]] = {
    "one": eager(1),
    "two": eager(2),
    "four": eager(4),
    "compiled_two": [Launch(compiled, 2, compiles=True)],
    "stock_one": [Launch(stock, compiles=True)],
    "two_workers": [Launch(on_two_gpus, compiles=True)],
}
Running = dict[str, list[Future[Outcome]]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The launches that the selected tests ask for."""
    tests = [item for item in request.session.items if item.path == request.path and not skipped(item)]
    wanted = {name for item in tests for name in getattr(item, "fixturenames", ())}
    wanted |= {call.params.get("ranks") for item in tests if (call := getattr(item, "callspec", None))}
    with ThreadPoolExecutor(max_workers=16) as pool:

        def start(name: str, one: Launch) -> Future[Outcome]:
            env = {"ATOM_PCP_DEBUG": "0" if one.compiles else "1", "TORCHDYNAMO_DISABLE": "0" if one.compiles else "1"}
            folder = tmp_path_factory.mktemp(name)
            return pool.submit(launch, folder, chosen(tests, one.engines()), one.ranks, env)

        yield {name: [start(name, one) for one in launches] for name, launches in LAUNCHES.items() if name in wanted}


def skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def chosen(tests: list[pytest.Item], engines: dict[str, Engine]) -> dict[str, Engine]:
    """The engines that the selected tests look at."""
    calls = [getattr(item, "callspec", None) for item in tests]
    keys = {call.params.get("key") for call in calls if call is not None}
    return {key: plan for key, plan in engines.items() if key in keys}


def outcome(launches: list[Future[Outcome]]) -> Outcome:
    """What several launches gave, as one."""
    ended = [future.result() for future in launches]
    results = {key: ranks for one in ended for key, ranks in one.results.items()}
    logs = {key: ranks for one in ended for key, ranks in one.logs.items()}
    return Outcome(results, logs, "\n".join(one.failure for one in ended))


@pytest.fixture(scope="module")
def one(running: Running) -> Outcome:
    return outcome(running["one"])


@pytest.fixture(scope="module")
def two(running: Running) -> Outcome:
    return outcome(running["two"])


@pytest.fixture(scope="module")
def four(running: Running) -> Outcome:
    return outcome(running["four"])


@pytest.fixture(scope="module")
def compiled_two(running: Running) -> Outcome:
    return outcome(running["compiled_two"])


@pytest.fixture(scope="module")
def stock_one(running: Running) -> Outcome:
    return outcome(running["stock_one"])


@pytest.fixture(scope="module")
def two_workers(running: Running) -> Outcome:
    return outcome(running["two_workers"])


def tokens(answers: list[Any]) -> list[Any]:
    return [answer and [sample["tokens"] for sample in answer["samples"]] for answer in answers]


def check_equal(
    ranks: list[dict[str, Any]], expected: dict[str, Any], coarser: float = 1, waves: int | None = None
) -> None:
    """All ranks went on with the same tokens, and gave what the expected engine gave, but for rounding.

    The expected engine may have had more waves than the ranks' `waves`.
    """
    for rank in ranks:
        assert rank["leaked"] == 0
        distances: list[Distance] = []
        for index, (answers, reference) in enumerate(zip(rank["waves"], expected["waves"][:waves], strict=True)):
            assert tokens(answers) == tokens(ranks[0]["waves"][index]), f"ranks forked in wave {index}"
            assert [a and a["cached"] for a in answers] == [a and a["cached"] for a in reference]
            seen = distance(answers, reference)
            print(f"wave {index}: {seen}")
            check_rounding(seen, coarser)
            distances.append(seen)
        check_together(distances, coarser)


def check_rounding(seen: Distance, coarser: float = 1) -> None:
    """Nothing but rounding stands between two engines' answers, so many times coarser than bfloat16's."""
    worst = WORST * coarser
    assert seen.worst < worst and seen.mean < MEAN * coarser, str(seen)
    # A fork needs two candidates as close as both engines' errors together.
    assert all(fork < 2 * worst for fork in seen.forks), str(seen)


def check_together(distances: list[Distance], coarser: float = 1) -> None:
    """Answers stay together for half of their tokens, over all waves: in one, a near tie may come at its very start.

    Pairs that are this close come in proportion to the errors, so coarser ones let answers part sooner.
    """
    compared, generated = (sum(getattr(one, what) for one in distances) for what in ("compared", "tokens"))
    assert compared >= generated / (2 * coarser), f"{compared} of {generated} tokens"


@pytest.mark.parametrize("key", ["hybrid", "dense", "atom", "triton replicate", "experts"])
def test_two_ranks_on_one_gpu(one: Outcome, two: Outcome, key: str) -> None:
    check_equal(two.of(key), one.of(key)[0])


@pytest.mark.skipif(REHEARSAL, reason="the CPU platform serves neither")
@pytest.mark.parametrize("key", IN_FP8)
def test_two_ranks_with_values_in_fp8(one: Outcome, two: Outcome, key: str) -> None:
    check_equal(two.of(key), one.of(key)[0], coarser=IN_FP8[key])


@pytest.mark.parametrize("key", ["hybrid"])
def test_four_ranks_on_one_gpu(one: Outcome, four: Outcome, key: str) -> None:
    check_equal(four.of(key), one.of(key)[0])


@pytest.mark.parametrize("key", ["recall"])
@pytest.mark.parametrize("ranks", ["one", "two", "four"])
def test_what_stands_far_back_is_not_lost(ranks: str, key: str, request: pytest.FixtureRequest) -> None:
    launched: Outcome = request.getfixturevalue(ranks)
    for rank in launched.of(key):
        for answers in rank["waves"]:
            assert tokens(answers) == [[asked.answer] for asked in RECALL]


@pytest.mark.parametrize("key", ["hybrid"])
def test_ranks_split_and_run_as_asked(two: Outcome, key: str) -> None:
    """So that nothing above is equal because every rank ran everything."""
    two.of(key)
    for rank, log in enumerate(two.logs[key]):
        assert re.search(rf"split: rank {rank} of 2 runs \d+ rows of \d+", log)
        assert re.search(rf"self_attn\.attn: rank {rank} sends [1-9]\d* queries away", log)
        for mode in ("redundant", "relay", "two_pass", "head_all_to_all"):
            assert f"layers.0.linear_attn: rank {rank} runs its recurrence as {mode}" in log


@pytest.mark.skipif(REHEARSAL, reason="the CPU platform has neither")
@pytest.mark.parametrize(("key", "line"), [("hybrid", "FlashAttention version 3"), ("triton replicate", "TRITON_ATTN")])
def test_the_backend_is_the_one_asked_for(two: Outcome, key: str, line: str) -> None:
    two.of(key)
    assert line in two.logs[key][0]


@pytest.mark.parametrize("key", ["hybrid"])
def test_compiled_ranks_on_one_gpu(compiled_two: Outcome, stock_one: Outcome, key: str) -> None:
    check_equal(compiled_two.of(key), stock_one.of(key)[0], waves=len(MIXED))


@pytest.mark.parametrize("key", ["atom"])
def test_compiled_ranks_with_an_atom_decoder(compiled_two: Outcome, one: Outcome, key: str) -> None:
    ranks = compiled_two.of(key)
    assert all(rank["patches"]["vllm.models.initialize_model"] == "applied" for rank in ranks)
    check_equal(ranks, one.of(key)[0])


@pytest.mark.parametrize("key", ["hybrid", "dense"])
def test_one_rank_runs_on_the_engines_own_objects(stock_one: Outcome, key: str) -> None:
    """Compiled and with graphs, as vLLM does by default: the group is inactive, and its targets are untouched."""
    [result] = stock_one.of(key)
    states = {name: state for name, state in result["patches"].items() if name.startswith("vllm.pcp.")}
    assert len(states) > 20 and set(states.values()) == {"inactive"}
    assert len(result["own"]) > 10 and all(result["own"].values()), result["own"]
    if not REHEARSAL:
        assert replays(result, "whole FULL") and replays(result, "whole PIECEWISE"), result["graphs"]


@pytest.mark.parametrize("key", ["hybrid"])
def test_patched_functions_are_told_from_the_engines_own(two: Outcome, key: str) -> None:
    own = two.of(key)[0]["own"]
    assert not own["vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward"]


def replays(result: dict[str, Any], kind: str) -> list[int]:
    """Graphs of a kind that each worker replayed in all waves; empty if one worker replayed none."""
    workers = zip(*result["graphs"], strict=True)
    counts = [sum(taken.get(kind, 0) for taken in worker) for worker in workers]
    return counts if all(counts) else []


@two_gpus
@pytest.mark.parametrize("key", ["hybrid", "dense"])
def test_two_gpus_equal_one(two_workers: Outcome, stock_one: Outcome, key: str) -> None:
    check_equal(two_workers.of(key), stock_one.of(key)[0])


@two_gpus
@pytest.mark.parametrize("key", ["recall"])
def test_two_gpus_lose_nothing_far_back(two_workers: Outcome, key: str) -> None:
    [result] = two_workers.of(key)
    assert [tokens(answers) for answers in result["waves"]] == [[[asked.answer] for asked in RECALL]]


@two_gpus
@pytest.mark.skipif(REHEARSAL, reason="the CPU platform has no graphs")
@pytest.mark.parametrize("key", ["hybrid", "dense"])
def test_two_gpus_replay_graphs(two_workers: Outcome, key: str) -> None:
    """Decodes a whole graph, the rows of a split prefill a graph for each piece between exchanges; no rank others."""
    [result] = two_workers.of(key)
    for kind in ("whole FULL", "split PIECEWISE"):
        counts = replays(result, kind)
        assert counts and len(set(counts)) == 1, result["graphs"]
