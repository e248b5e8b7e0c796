"""ATOM decoders under prefill context parallelism: two real ranks give the oracle's answers, by our classes alone.

Prompts are cut into chunks, begin alike, come from the cache, and are scored; decodes run beside them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.pcp_engines import Engine, check_greedy, launch, log_of
from tests.vllm.test_atom_models import DEMO, DEMO_LAYERS, at_once, atom, check_ours, conversation

RANKS = 2
SPLIT: dict[str, Any] = {"prefill_context_parallel_size": RANKS, "distributed_executor_backend": "external_launcher"}
#: An engine's checkpoint, and how its ranks are to share the work; how recurrent layers do it comes first.
SHARING: dict[str, tuple[str, dict[str, str]]] = {
    "relay": ("qwen3_next", {"ATOM_PCP_GDN": "relay", "ATOM_PCP_MOE": "replicate"}),
    "two passes, experts cut": ("qwen3_next", {"ATOM_PCP_GDN": "two_pass", "ATOM_PCP_MOE": "shard"}),
    "heads, experts dealt out": ("qwen3_5_moe", {"ATOM_PCP_GDN": "head_all_to_all", "ATOM_PCP_MOE": "ep"}),
    "redundant": ("qwen3_5", {"ATOM_PCP_GDN": "redundant"}),
    "zigzag": ("llama_tied", {"ATOM_PCP_ATTENTION": "zigzag"}),
    "contiguous": ("qwen3_tied", {"ATOM_PCP_ATTENTION": "contiguous"}),
}
OWN_EXPERTS = "own experts"


def plans() -> dict[str, Engine]:
    found = {key: _plan(name, env) for key, (name, env) in SHARING.items()}
    # Last, because it leaves vLLM's kernels without their weights.
    found[OWN_EXPERTS] = atom(
        DEMO, at_once(), setup="tests.vllm.own_experts", max_num_batched_tokens=320, **SPLIT,
        env={"ATOM_PCP_MOE": "replicate", "ATOM_PCP_DEBUG": "1"},
    )  # fmt: skip
    return found


def _plan(name: str, env: dict[str, str]) -> Engine:
    spread = env.get("ATOM_PCP_MOE") == "ep"
    return atom(name, env={**env, "ATOM_PCP_DEBUG": "1"}, enable_expert_parallel=spread, **SPLIT)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("atom_models_pcp")
    return folder, launch(folder, RANKS, plans())


@pytest.mark.parametrize("key", SHARING)
def test_every_answer_is_the_oracle_s(engines: tuple[Path, dict[str, list[Any]]], key: str) -> None:
    name, _ = SHARING[key]
    for result in engines[1][key]:
        check_ours(result["report"], name)
        waves = zip(conversation(name), result["waves"], strict=True)
        assert [check_greedy(name, sent, got) for sent, got in waves] == [10, 2, 1, 1, 1]
        assert all(turn[0]["cached"] for turn in result["waves"][2:])
        assert result["free_before"] == result["free_after"]


@pytest.mark.parametrize("key", SHARING)
def test_ranks_share_the_rows(engines: tuple[Path, dict[str, list[Any]]], key: str) -> None:
    folder, results = engines
    name, env = SHARING[key]
    for rank in range(RANKS):
        log = log_of(folder, results, key, rank)
        assert f"split: rank {rank} of {RANKS} runs" in log
        if "ATOM_PCP_GDN" in env:
            line = f"layers.0.linear_attn: rank {rank} runs its recurrence as {env['ATOM_PCP_GDN']}"
            assert line in log
        # Experts that ranks have parts of are met in each layer of a split step.
        assert ("rows for the experts" in log) == (env.get("ATOM_PCP_MOE") in ("shard", "ep")), name


def test_our_kernel_runs_experts_that_every_rank_has(engines: tuple[Path, dict[str, list[Any]]]) -> None:
    for result in engines[1][OWN_EXPERTS]:
        check_ours(result["report"], DEMO, DEMO_LAYERS)
        assert result["report"]["along"] == [True] * DEMO_LAYERS
        check_greedy(DEMO, at_once(), result["waves"][0])


@pytest.mark.parametrize(("sharing", "own"), [({}, True), ({"dp_size": 2}, False), ({"pcp_size": 2}, False)])
def test_vllm_s_kernels_run_experts_that_rows_travel_to(sharing: dict[str, int], own: bool) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from atom_patches.vllm.adapters.models.experts import _as_stored

    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    vars(method)["unquantized_backend"] = UnquantizedMoeBackend.TRITON
    layout = SimpleNamespace(**{"dp_size": 1, "pcp_size": 1, **sharing})
    experts: Any = SimpleNamespace(quant_method=method, moe_parallel_config=layout)
    assert _as_stored(experts) is own
