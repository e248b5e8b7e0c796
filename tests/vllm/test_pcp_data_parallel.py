"""Data-parallel engines, each with prefill-context-parallel ranks: whatever the other engine does, answers are right.

In a step one engine may split a prefill while the other decodes, or has nothing to do; experts are shared by both.
"""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.running import START_SECONDS, is_healthy
from tests.vllm.gdn_oracle import Prompt, environment, free_port, oracle, prompt, run_engines
from tests.vllm.launches import launch, server_command, workers_environment
from tests.vllm.pcp_engines import MIXED, NEW, PATH, Engine, check_greedy, engine, request, wave
from tests.vllm.pcp_waves import CACHING, CHUNKED, STAGGERED, cached_waves

pytestmark = pytest.mark.long

ENGINES = RANKS = 2

#: A prompt of one token is never split.
DECODES = [request(prompt(1, seed=n), max_tokens=30) for n in (1, 30)]
LATE = [request(prompt(n, seed=30), at=at) for n, at in ((90, 4), (23, 9))]

#: The waves of each engine: split beside replicated steps; idle engines; arrivals while the other one is at work.
MIXTURE: list[list[list[dict[str, Any]]]] = [
    [wave(), DECODES],
    [[], wave(MIXED[2:5])],
    [STAGGERED, LATE],
    [wave(MIXED[3:5]), STAGGERED],
    [DECODES, []],
]
CACHED = cached_waves("qwen3_next")


def spread(name: str, **more: Any) -> tuple[Engine, Engine]:
    """The plans of both engines with the mixture of waves."""
    return tuple(engine(name, [pair[index] for pair in MIXTURE], **more) for index in range(ENGINES))  # type: ignore[return-value]


def cached(**more: Any) -> tuple[Engine, Engine]:
    """The plans of engines that find prefixes, each the other's a wave later."""
    late: list[list[dict[str, Any]]] = [[], *CACHED]
    return engine("qwen3_next", [*CACHED, []], **CACHING, **more), engine("qwen3_next", late, **CACHING, **more)


PLANS: dict[str, tuple[Engine, Engine]] = {
    "replicate": spread("qwen3_next", env={"ATOM_PCP_MOE": "replicate"}, **CHUNKED),
    "shard": spread("qwen3_next", env={"ATOM_PCP_MOE": "shard"}),
    "ep": spread("qwen3_next", enable_expert_parallel=True, **CHUNKED),
    "ep caching": cached(enable_expert_parallel=True),
    "qwen3_5 shard": spread("qwen3_5_moe", env={"ATOM_PCP_GDN": "two_pass"}, **CHUNKED),
}
MODELS = {"qwen3_5 shard": "qwen3_5_moe"}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By key, the results of every process: of both ranks of the first engine, then of the second."""
    keys = [key for key in PLANS if any(f"[{key}]" in item.name for item in request.session.items)]
    size = {
        "prefill_context_parallel_size": RANKS,
        "data_parallel_size": ENGINES,
        "distributed_executor_backend": "external_launcher",
    }
    chosen = [PLANS[key] for key in keys]
    ports = [str(free_port()) for _ in keys]
    plans = [
        [
            {**both[index], "options": {**both[index]["options"], **size},
             "env": {**both[index].get("env", {}), "MASTER_PORT": port}}
            for both, port in zip(chosen, ports, strict=True)
        ]
        for index in range(ENGINES)
        for _ in range(RANKS)
    ]  # fmt: skip
    envs = [
        environment(
            PYTHONPATH=PATH, ATOM_PCP_MIN_ROWS="1", ATOM_PCP_GDN="relay", RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(len(plans)), MASTER_ADDR="127.0.0.1",
        )
        for rank in range(len(plans))
    ]  # fmt: skip
    found = run_engines(tmp_path_factory.mktemp("data"), plans, envs, "dp_traffic.py", 500)
    return {key: [result[index] for result in found] for index, key in enumerate(keys)}


@pytest.mark.parametrize("key", PLANS)
def test_engines_equal_the_oracle(results: dict[str, list[Any]], key: str) -> None:
    checked = 0
    for process, result in enumerate(results[key]):
        for sent, got in zip(PLANS[key][process // RANKS]["waves"], result["waves"], strict=True):
            checked += check_greedy(MODELS.get(key, "qwen3_next"), sent, got)
    assert checked > 20


@pytest.mark.parametrize("key", ["replicate", "shard", "ep"])
def test_engines_ran_their_steps_differently(results: dict[str, list[Any]], key: str) -> None:
    met = set()
    for first, second in zip(results[key][0]["passes"], results[key][RANKS]["passes"], strict=True):
        assert len(first) == len(second), "engines ran another number of passes"
        met |= set(zip(first, second, strict=True))
    kinds = ("split", "replicated", "dummy")
    assert met >= {(one, other) for one in kinds for other in kinds} - {("dummy", "dummy")}


@pytest.mark.parametrize("key", ["ep caching"])
def test_prefixes_are_found_as_without_the_other_engine(results: dict[str, list[Any]], key: str) -> None:
    first, second = (results[key][process]["waves"] for process in (0, RANKS))
    hits = [[answer["cached"] for answer in wave] for wave in first[:-1]]
    assert hits == [[answer["cached"] for answer in wave] for wave in second[1:]]
    assert sum(hits[1]) > 0


@pytest.mark.parametrize("key", ["replicate", "shard", "ep"])
def test_members_are_in_place(results: dict[str, list[Any]], key: str) -> None:
    for result in results[key]:
        states = result["patches"]
        assert states["vllm.pcp.dp_rows"] == "applied"
        outer = "inactive" if key == "replicate" else "applied"
        assert states["vllm.pcp.dp_naive"] == states["vllm.pcp.dp_exchange"] == outer


def complete(port: int, model: str, tokens: Prompt, to: int) -> list[int]:
    """The continuation of a prompt by one of the server's engines."""
    asked = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({"model": model, "prompt": list(tokens), **asked}).encode()
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(to)}
    sent = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(sent, timeout=120) as answer:
        [choice] = json.load(answer)["choices"]
        return choice["token_ids"]


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3"])
def test_a_server_with_two_engines(tmp_path: Path, name: str) -> None:
    """With experts engines step together, one perhaps without work; without experts each is by itself."""
    model, port = str(oracle(name).path), free_port()
    options = ["--data-parallel-size", "2", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    command = server_command(model, port, *options, "--no-enable-prefix-caching")
    env = workers_environment(ATOM_PCP_DEBUG="1", VLLM_CPU_OMP_THREADS_BIND="0|1|0|1")
    with launch(tmp_path, [command], [env]) as running:
        running.wait_for(lambda: is_healthy(port), START_SECONDS)
        first = [complete(port, model, tokens, 1) for tokens in MIXED[3:5]]
        with ThreadPoolExecutor(len(MIXED)) as clients:
            asked = [clients.submit(complete, port, model, tokens, i % 2) for i, tokens in enumerate(MIXED)]
            got = [one.result() for one in asked]
        log = running.text()
    for tokens, answer in zip([*MIXED[3:5], *MIXED], [*first, *got], strict=True):
        assert answer == oracle(name).answer(tokens, NEW)[0], f"prompt of {len(tokens)} tokens"
    workers = set(re.findall(r"\((Worker\S* pid=\d+)\).*split: rank [01] of 2", log))
    assert len(workers) == 4, workers
