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


def moved_as_fp8(rank: int, world_size: int, lens: tuple[int, ...], group: Any) -> None:
    """Move rows whose FP8 elements spell their own numbers in bytes, among them those that are no numbers in FP8."""
    plan = PcpPlan(world_size, lens)
    if plan.pool_size < world_size:
        return
    exchange = QueryExchange(plan)
    mover = QueryMover(exchange, group, torch.device("cpu"))
    rows = plan.local_rows(rank)
    collected = mover.collect(spelled(rows))
    answered = torch.cat([plan.replicated_rows(), plan.pool_rows()[exchange.cut.pool_rows(rank)]])
    assert collected.view(torch.uint8).equal(spelled(answered).view(torch.uint8))
    output = torch.full((plan.rows_per_rank, 2, 3), torch.nan).to(torch.float8_e4m3fn)
    mover.hand_back(collected, output)
    expected = spelled(rows).view(torch.uint8)
    expected[len(rows) - plan.padding(rank) :] = 0
    assert output.view(torch.uint8).equal(expected)
    assert output[len(rows) - plan.padding(rank) :].float().count_nonzero() == 0


def spelled(rows: torch.Tensor) -> torch.Tensor:
    """For every row number an FP8 row [2, 3] of its low and high byte, and 127, which is no number in FP8."""
    low_high = torch.stack([rows % 256, rows // 256, torch.full_like(rows, 127)], dim=1).to(torch.uint8)
    return low_high[:, None, :].expand(-1, 2, -1).contiguous().view(torch.float8_e4m3fn)


def work(rank: int, world_size: int, store: str) -> None:
    """One rank's process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = SimpleNamespace(rank_in_group=rank, device_group=torch.distributed.group.WORLD)
    for lens in STEPS:
        moved(rank, world_size, lens, group)
        moved_as_fp8(rank, world_size, lens, group)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [3, 4])
def test_queries_move_and_answers_return(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (world_size, f"{folder}/store"), nprocs=world_size)  # type: ignore[no-untyped-call]
