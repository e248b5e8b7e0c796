"""Rows that a rank brings to the experts of all engines are those that vLLM's and our exchanges leave it with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.vllm.adapters import pcp_data_parallel
from atom_patches.vllm.adapters.pcp_data_parallel import expert_rows
from atom_patches.vllm.adapters.pcp_step import SplitStep

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


class Group:
    """A prefill-context-parallel group, as far as a step's metadata asks it."""

    rank_in_group = 0


def step(plan: PcpPlan) -> SplitStep:
    return SplitStep(plan, Group(), torch.device("cpu"))  # type: ignore[arg-type]


@given(LENGTHS, st.integers(2, 5), st.booleans())
def test_rows_of_a_pass(lengths: list[int], ranks: int, spread: bool) -> None:
    """What a rank has of a step: its own rows, of all ranks together where they meet first; or all of it."""
    plan = plan_step(lengths, ranks, 1)
    total = sum(lengths)
    metadata: Any = {} if plan is None else step(plan)
    rows = expert_rows(metadata, total, ranks, spread)
    if plan is None:
        assert rows == total
    else:
        own = [len(plan.local_rows(rank)) for rank in range(ranks)]
        assert rows == (sum(own) if spread else own[0])


@given(st.integers(1, 40), st.integers(2, 5))
def test_rows_of_a_pass_without_metadata(rows: int, ranks: int) -> None:
    assert expert_rows(None, rows, ranks, spread=True) == rows * ranks
    assert expert_rows(None, rows, ranks, spread=False) == rows


def test_every_engine_learns_the_rows_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine's count comes out of the exchange, this one's is where its number says."""

    class Engines:
        world_size, rank_in_group, cpu_group = 2, 1, None

    def all_reduce(counts: torch.Tensor, group: Any) -> None:
        assert counts.tolist() == [0, 7]
        counts[0] += 5

    monkeypatch.setattr(pcp_data_parallel, "get_dp_group", Engines)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert pcp_data_parallel.rows_of_engines(7).num_tokens_across_dp_cpu.tolist() == [5, 7]
