"""The recorder sees every collective of real gloo ranks, however torch.distributed was imported."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_dp.compare import divergence
from fuzz_dp.recorder import Entry

pytest.importorskip("torch")

TOOLS = Path(__file__).parents[2] / "tools"

RANK = """
import pickle, sys
import torch, torch.distributed as dist
from torch.distributed import all_reduce
from fuzz_dp.recorder import recording
rank, meeting, case, out = int(sys.argv[1]), *sys.argv[2:]
with recording() as recorder:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    recorder.cut()
    rows = torch.ones(2, 3)
    all_reduce(rows)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=pair)
    dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], rows, group=pair)
    dist.all_gather_into_tensor(torch.empty(4, 3), rows)
    dist.broadcast(rows, src=1)
    dist.broadcast_object_list([None], src=0)
    dist.barrier()
    split = [1, 3] if rank == 0 else [2, 2]
    back = [1, 2] if rank == 0 else [3, 2]
    dist.all_to_all_single(torch.empty(sum(back), 3), torch.ones(4, 3), back, split)
    (dist.send if rank == 0 else dist.recv)(rows, 1 - rank)
    if case == "part" and rank == 1:
        dist.broadcast(rows[:1], src=1, group=pair, async_op=True)  # nobody else will
    entries = recorder.cut()
    assert not recorder.peek()
if case == "agree":
    all_reduce(rows)
assert not recorder.peek(), "still recording after the block"
pickle.dump(entries, open(out, "wb"))
import os; os._exit(0)  # without waiting for what the other rank will never enter
"""


@pytest.mark.parametrize("case", ["agree", "part"])
def test_real_ranks(case: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting"), case, str(tmp_path / str(rank))],
            env={"PYTHONPATH": str(TOOLS), "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()
    sequences: dict[int, list[Entry]] = {i: pickle.loads((tmp_path / str(i)).read_bytes()) for i in range(2)}
    names = [entry.operation for entry in sequences[0]]
    # An object goes as its size and its bytes.
    assert names[:5] == ["allreduce", "allreduce", "allgather", "_allgather_base", "broadcast"]
    assert names[5:7] == ["broadcast", "broadcast"] and names[7] in ("barrier", "monitored_barrier")
    assert names[8:] == ["alltoall_base", "send"]
    first, second = sequences[0][:2]
    assert (first.shape, first.dtype, first.agreed, first.ranks) == ((2, 3), "float32", ("sum",), (0, 1))
    assert second.agreed == ("max",) and second.group != first.group
    assert "<module>" in first.site
    found = divergence(sequences)
    assert (found is None) == (case == "agree")
    if found is not None:
        assert found.entries[0] is None and "broadcast [1, 3]" in str(found)
