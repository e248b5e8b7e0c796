"""The communicator of ranks that share a device gives what NCCL would."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.vllm.gdn_oracle import ROOT, environment, free_port

RANKS = 3
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from tests.vllm.staged_ranks import StagedCommunicator

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
group = dist.new_group(list(range(size)), backend="gloo")
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
to = StagedCommunicator(group, device, group, "pcp:0")
for dtype in (torch.float32, torch.bfloat16):
    own = torch.arange(12, device=device, dtype=dtype).view(6, 2) + rank
    before = own.clone()
    total = sum(torch.arange(12, device=device, dtype=dtype).view(6, 2) + other for other in range(size))
    reduced = to.all_reduce(own)
    assert reduced.equal(total) and own.equal(before) and reduced is not own
    assert to.reduce_scatter(own, dim=0).equal(total.chunk(size)[rank])
    assert to.all_gather(own, dim=0).equal(torch.cat([before - rank + other for other in range(size)]))
state = torch.full((2, 5), rank, dtype=torch.uint8, device=device)
if rank:
    received = to.recv(state.shape, state.dtype, src=rank - 1)
    assert received.device.type == device.type and received.equal(state - 1)
if rank + 1 < size:
    to.send(state, dst=rank + 1)
assert to.broadcast(state.clone(), src=1).equal(torch.ones_like(state))
dist.destroy_process_group()
print("right")
"""


def test_every_rank_gets_what_it_should() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shared = environment(
        PYTHONPATH=path, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**shared, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(output.splitlines()[-1:] == ["right"] for output in outputs), outputs
