"""Two ranks of vLLM's second model runner give what transformers gives in float32: tokens and log-probabilities.

The runner is real, on the CPU platform with Triton's interpreter; so are its scheduler, caches, batches and sampling.
GatedDeltaNet layers run as on a GPU, with torch in place of its kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom_patches.core import source
from atom_patches.vllm.pcp_manager import _config
from tests.vllm.gdn_oracle import environment, free_port, run_engines
from tests.vllm.pcp_engines import MIXED, PATH, check_greedy, engine, request, wave

pytestmark = pytest.mark.skipif(
    not source.defined(_config.MANAGER).ok, reason="this vLLM has no manager of prefill context parallelism"
)

RANKS = 2
SETUP = "tests.vllm.second_runner_gdn"
LONG = [MIXED[6], MIXED[8]]


def planned(name: str, waves: list[list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    """An engine on two ranks."""
    plan = engine(name, waves, setup=SETUP, prefill_context_parallel_size=RANKS, **more)
    plan["options"]["distributed_executor_backend"] = "external_launcher"
    plan["env"] = {"MASTER_PORT": str(free_port()), **plan.get("env", {})}
    return plan


def plans() -> dict[str, dict[str, Any]]:
    """The engines, one after the other."""
    modes = [
        (f"qwen3_5 {mode}", planned("qwen3_5", [wave()], env={"ATOM_PCP_GDN": mode}))
        for mode in ("relay", "two_pass", "head_all_to_all", "redundant")
    ]
    sampled = [request(tokens, temperature=1.0, seed=7) for tokens in LONG]
    staggered = [request(tokens, at=3 * index) for index, tokens in enumerate(MIXED)]
    return {
        "qwen3": planned(
            "qwen3", [[*wave(), request(MIXED[2], prompt_logprobs=2)], sampled], env={"ATOM_PCP_ATTENTION": "zigzag"}
        ),
        "qwen3 contiguous": planned("qwen3", [staggered], env={"ATOM_PCP_ATTENTION": "contiguous"}),
        **dict(modes),
        "qwen3_5 staggered": planned("qwen3_5", [staggered, sampled]),
    }


Results = dict[str, list[dict[str, Any]]]


def run(folder: Path, engines: dict[str, dict[str, Any]], ranks: int) -> Results:
    """Each engine's results by rank."""
    envs = [
        environment(
            PYTHONPATH=PATH, ATOM_PCP_MIN_ROWS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = run_engines(folder, [list(engines.values())] * ranks, envs, "second_runner_traffic.py", 500)
    return {name: [rank[at] for rank in found] for at, name in enumerate(engines)}


def check(name: str, plan: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Every rank gave the oracle's tokens, ran its share of the rows, and gave all cache blocks back."""
    checked = sum(
        check_greedy(name.split()[0], sent, got) for sent, got in zip(plan["waves"], ranks[0]["waves"], strict=True)
    )
    assert checked >= len(MIXED)
    for rank in ranks:
        for answers, first in zip(rank["waves"], ranks[0]["waves"], strict=True):
            assert [one["samples"][0]["tokens"] for one in answers] == [one["samples"][0]["tokens"] for one in first]
        assert rank["free_before"] == rank["free_after"]
        # Decodes are replicated, and a rank's slice may be padded by a row.
        report = rank["report"]
        assert report["split"] > 1 and report["own"] < 0.6 * report["whole"]


@pytest.fixture(scope="module")
def planned_engines() -> dict[str, dict[str, Any]]:
    return plans()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, planned_engines: dict[str, dict[str, Any]]) -> Results:
    return run(tmp_path_factory.mktemp("pcp_manager"), planned_engines, RANKS)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3", "qwen3 contiguous", "qwen3_5 relay", "qwen3_5 two_pass", "qwen3_5 head_all_to_all",
        "qwen3_5 redundant", "qwen3_5 staggered",
    ],
)  # fmt: skip
def test_two_ranks(results: Results, planned_engines: dict[str, dict[str, Any]], name: str) -> None:
    check(name, planned_engines[name], results[name])


def test_every_member_is_in_place(results: Results) -> None:
    states = results["qwen3_5 relay"][0]["patches"]
    group = {name: state for name, state in states.items() if name.startswith("vllm.pcp_manager.")}
    # The CPU platform does not import FlashAttention.
    assert group.pop("vllm.pcp_manager.flash_attention") == "pending"
    assert group and set(group.values()) == {"applied"}
    assert not [name for name, state in states.items() if name.startswith("vllm.pcp.") and state == "applied"]
