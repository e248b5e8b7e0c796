"""Ranks of a prefill context parallel engine enter the same collectives in the same order, whatever the step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fuzz_dp.compare import divergence

from tests.vllm.collectives_probe import entries
from tests.vllm.pcp_engines import Engine, engine, launch, wave
from tests.vllm.pcp_waves import ALONE, STAGGERED

pytestmark = pytest.mark.long

PROBE = {"setup": "tests.vllm.collectives_probe"}
CHUNKED = {"max_num_batched_tokens": 96}


def engines(ranks: int) -> dict[str, Engine]:
    """Every way in which rows, states and queries are exchanged; split and whole steps, chunks, few and many rows."""
    size = {"prefill_context_parallel_size": ranks}

    def plan(name: str, gdn: str, attention: str, **more: Any) -> Engine:
        env = {"ATOM_PCP_GDN": gdn, "ATOM_PCP_ATTENTION": attention}
        return engine(name, [wave(), STAGGERED, ALONE], env=env, **PROBE, **size, **more)

    found = {"relay chunked": plan("qwen3_next", "relay", "contiguous", **CHUNKED)}
    if ranks == 2:
        found["two_pass zigzag"] = plan("qwen3_next", "two_pass", "zigzag")
        found["redundant"] = plan("qwen3_next", "redundant", "contiguous")
        found["heads zigzag"] = plan("qwen3_next_heads", "head_all_to_all", "zigzag", **CHUNKED)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_enter_the_same_collectives(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    results = launch(tmp_path_factory.mktemp(f"collectives{ranks}"), ranks, engines(ranks))
    for key, by_rank in results.items():
        sequences = {rank: entries(result["report"]) for rank, result in enumerate(by_rank)}
        parted = divergence(sequences)
        assert parted is None, f"{key}: {parted}"
        kinds = Counter(entry.operation for entry in sequences[0])
        assert sum(kinds.values()) > 200, f"{key}: {kinds}"
        # One or two of each are entered before the first step, whatever follows, so that links are open.
        assert (kinds["send"] + kinds["recv"] > 5) == ("relay" in key), f"{key}: {kinds}"
        assert (kinds["alltoall_base"] > 5) == ("zigzag" in key), f"{key}: {kinds}"
