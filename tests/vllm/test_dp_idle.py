"""Data-parallel ranks with the engine core in the caller's process: one whose request waits keeps up with the other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.gdn_oracle import environment, free_port, oracle, prompt, run_engines
from tests.vllm.pcp_engines import PATH

pytestmark = pytest.mark.long

NAME = "qwen3_next"
RANKS = 2
NEW = 12
GRAMMAR = [list(prompt(5, seed=1)), 0]
FREE = [list(prompt(37, seed=1)), NEW]

#: The waves of each rank: one waits while the other is at work; both work; one has nothing to do at all.
WAVES: tuple[list[list[list[Any]]], ...] = (
    [[GRAMMAR], [FREE], [FREE], []],
    [[FREE], [GRAMMAR, FREE], [FREE], [FREE]],
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    options = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=128, enable_prefix_caching=False)
    plans = [[{"model": str(oracle(NAME).path), "options": options, "waves": waves}] for waves in WAVES]
    port = str(free_port())
    envs = [
        environment(
            PYTHONPATH=PATH, VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE=str(RANKS),
            VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=port, VLLM_CPU_OMP_THREADS_BIND="0|1",
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    found = run_engines(tmp_path_factory.mktemp("idle"), plans, envs, "dp_idle_rank.py", 240)
    return [result for [result] in found]


def test_ranks_equal_the_oracle(results: list[dict[str, Any]]) -> None:
    checked = 0
    for waves, result in zip(WAVES, results, strict=True):
        assert result["state"] == "applied"
        for sent, got in zip(waves, result["waves"], strict=True):
            for (tokens, new), answer in zip(sent, got, strict=True):
                if new:
                    assert answer == oracle(NAME).answer(tuple(tokens), new)[0]
                    checked += 1
                else:
                    assert answer
    assert checked == 6


def test_each_step_has_one_forward_pass(results: list[dict[str, Any]]) -> None:
    """Of scheduled tokens, or else a dummy one; and there were steps that scheduled none."""
    for result in results:
        assert result["steps"]
        for step in result["steps"]:
            passes = [tokens for tokens in step if tokens]
            assert len(passes) == 1, step
    assert any(step == [0, -1] for result in results for step in result["steps"])
