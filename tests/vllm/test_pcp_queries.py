"""Queries reach the ranks that answer them, and answers return, through real collectives between processes."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atom_patches.runtime.pcp import PcpPlan
from atom_patches.runtime.pcp_attention_split import QueryExchange
from atom_patches.vllm.adapters.pcp_queries import QueryMover

#: Padding on several ranks, slices of one row, a request in both pieces of a rank, decodes between, many requests.
STEPS = ((400,), (5, 2), (1, 37, 1, 150), (4,), (9,), (2, 2, 2, 2, 2, 1, 300), (63, 64, 65))


def moved(rank: int, world_size: int, lens: tuple[int, ...], group: Any) -> None:
    """Move rows that say their own numbers."""
    plan = PcpPlan(world_size, lens)
    if plan.pool_size < world_size:
        return
    exchange = QueryExchange(plan)
    mover = QueryMover(exchange, group, torch.device("cpu"))
    rows = plan.local_rows(rank)
    collected = mover.collect(rows.float()[:, None, None].expand(-1, 2, 3))
    answered = torch.cat([plan.replicated_rows(), plan.pool_rows()[exchange.cut.pool_rows(rank)]])
    assert collected.shape == (len(answered), 2, 3)
    assert collected[:, 1, 2].tolist() == answered.tolist()
    output = torch.full((plan.rows_per_rank, 2, 3), torch.nan)
    mover.hand_back(-1 - collected, output)
    expected = -1.0 - rows
    expected[len(rows) - plan.padding(rank) :] = 0
    assert output.equal(expected[:, None, None].expand(-1, 2, 3))


def work(rank: int, world_size: int, store: str) -> None:
    """One rank's process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = SimpleNamespace(rank_in_group=rank, device_group=torch.distributed.group.WORLD)
    for lens in STEPS:
        moved(rank, world_size, lens, group)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [3, 4])
def test_queries_move_and_answers_return(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (world_size, f"{folder}/store"), nprocs=world_size)  # type: ignore[no-untyped-call]
