"""GatedDeltaNet in split steps: this package's scan in the engine's place, modes that change, and bfloat16."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.alternating_modes import MODES
from tests.vllm.gdn_oracle import oracle, prompt
from tests.vllm.pcp_engines import Engine, check_greedy, engine, launch, log_of, single, wave
from tests.vllm.pcp_waves import CACHING, CHUNKED, GREEDY, STAGGERED, cached_waves

Results = dict[str, list[dict[str, Any]]]

#: Scored token by token: lengths that cut a chunk, a page and a convolution's reach.
SCORED = [wave([prompt(n, seed=70) for n in (150, 37, 201, 64)], prompt_logprobs=0, max_tokens=1)]
RANKS = 2
MODES_OF_BFLOAT16 = ("relay", "two_pass", "redundant")


def engines() -> dict[str, Engine]:
    size = {"prefill_context_parallel_size": RANKS}

    def of(name: str, waves: list[list[dict[str, Any]]], mode: str, **more: Any) -> Engine:
        return engine(name, waves, env={"ATOM_PCP_GDN": mode, "ATOM_PCP_DEBUG": "1"}, **size, **more)

    plans = {
        f"bfloat16 {mode}": of("qwen3_next", SCORED, mode, dtype="bfloat16", **CHUNKED) for mode in MODES_OF_BFLOAT16
    }
    # Set-ups change their process for good, so these come last.
    plans["alternating"] = of(
        "qwen3_next", [*GREEDY[:2], *cached_waves("qwen3_next")], "auto", setup="tests.vllm.alternating_modes",
        **CACHING,
    )  # fmt: skip
    own = {"setup": "tests.vllm.own_scan"}
    plans["own relay"] = of("qwen3_next", [wave(), STAGGERED], "relay", **CHUNKED, **own)
    plans["own two_pass"] = of("qwen3_next", cached_waves("qwen3_next"), "two_pass", **CACHING, **own)
    return plans


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modes")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return launch(folder, RANKS, engines())


@pytest.mark.parametrize("key", ["alternating", "own relay", "own two_pass"])
def test_every_rank_equals_the_oracle(results: Results, key: str) -> None:
    for result in results[key]:
        for sent, got in zip(engines()[key]["waves"], result["waves"], strict=True):
            assert check_greedy("qwen3_next", sent, got) > 0
        assert result["free_after"] == result["free_before"]


def test_modes_change_within_a_prompt(results: Results, folder: Path) -> None:
    """The longest prompt takes five chunks, each of them run another way than the one before."""
    for rank in range(RANKS):
        log = log_of(folder, results, "alternating", rank)
        taken = re.findall(r"layers\.0\.linear_attn: rank \d runs its recurrence as (\w+)", log)
        assert set(taken) == set(MODES)
        assert all(one != following for one, following in zip(taken, taken[1:], strict=False))


@pytest.mark.parametrize("key", ["own relay", "own two_pass"])
def test_the_packages_scan_ran(results: Results, folder: Path, key: str) -> None:
    for rank in range(RANKS):
        assert results[key][rank]["report"]["gdn_prefill"] > 0
        assert "scans its own rows by torch" in log_of(folder, results, key, rank)


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plan = engine("qwen3_next", SCORED, dtype="bfloat16", distributed_executor_backend="uni", **CHUNKED)
    return single(tmp_path_factory.mktemp("unsplit"), {"bfloat16": plan})["bfloat16"]


def errors(result: dict[str, Any]) -> list[float]:
    """What the prompts' log-probabilities miss of those in float32."""
    found = []
    for asked, answer in zip(SCORED[0], result["waves"][0], strict=True):
        tokens = tuple(asked["prompt"])
        expected = oracle("qwen3_next").answer(tokens, 1)[1]
        for position, values in enumerate(answer["prompt_logprobs"][1:]):
            token = str(tokens[position + 1])
            found.append(values[token] - expected[position, int(token)].item())
    return found


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


@pytest.mark.parametrize("key", [f"bfloat16 {mode}" for mode in MODES_OF_BFLOAT16])
def test_bfloat16_misses_no_more_than_on_one_rank(results: Results, unsplit: dict[str, Any], key: str) -> None:
    """Another order of summation gives other errors of the same size, 0.014; a lost state gives 0.43."""
    allowed = 1.3 * root_mean_square(errors(unsplit))
    for result in results[key]:
        assert root_mean_square(errors(result)) < allowed
