"""What NCCL allocates for a group's exchanges is there before vLLM measures how much memory the KV cache may take.

NCCL makes a communicator in the first collective, and connects two ranks, or prepares an algorithm, when they are first
used: some hundred megabytes in all. In the first split step there would be no memory left for them, and in a graph's
capture they cannot be made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_pcp_group

from atom_patches.vllm.adapters.pcp_broadcast import broadcast
from atom_patches.vllm.adapters.pcp_experts import experts_are_spread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

BYTES = (1 << 10, 1 << 24)
"""By size, NCCL takes other algorithms and numbers of channels."""

ROW = 1 << 10


def open_links(config: VllmConfig) -> None:
    """Enter once, on all ranks alike, each collective that a step of this engine may enter."""
    group = get_pcp_group()
    for size in BYTES:
        rows = torch.zeros(group.world_size * max(1, size // ROW // group.world_size), ROW // 4, device=group.device)
        group.all_gather(rows, dim=0)
        broadcast(group, rows, src=0)
        if experts_are_spread(config):
            group.all_reduce(rows)
            group.reduce_scatter(rows, dim=0)
        if config.model_config.is_hybrid:
            torch.distributed.all_to_all_single(torch.empty_like(rows), rows, group=group.device_group)
            _hand_on(group, rows)


def _hand_on(group: GroupCoordinator, rows: torch.Tensor) -> None:
    """From the first rank to the last, as a relay does."""
    if group.rank_in_group > 0:
        group.recv(rows.shape, rows.dtype, src=group.rank_in_group - 1)
    if group.rank_in_group < group.world_size - 1:
        group.send(rows, dst=group.rank_in_group + 1)
