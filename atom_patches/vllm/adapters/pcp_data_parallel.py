"""Experts that data-parallel engines share, while each engine splits its own steps, or does not.

In one step an engine may split a prefill, another run decodes whole on all of its ranks, and a third have nothing to do
and run a dummy row. Nothing of that has to be agreed: rows meet over an engine's prefill-context-parallel ranks first,
which decide alike, and over the engines last, next to the experts. Then every rank of an engine sends the same rows to
the other engines, as many as its way of running the step gives, and only these counts are made known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_dp_group, get_ep_group
from vllm.forward_context import DPMetadata

from atom_patches.vllm.adapters.pcp_step import SplitStep


def expert_rows(metadata: Any, rows: int, ranks: int, spread: bool) -> int:
    """Rows that one rank brings to the exchange over data-parallel engines.

    Args:
        metadata: the pass's attention metadata; None for a profiling or dummy pass.
        rows: of the engine's step, before it is split.
        ranks: prefill-context-parallel ranks of the engine.
        spread: experts are spread over these ranks too, so that their rows have met before.
    """
    if isinstance(metadata, SplitStep):
        own = metadata.plan.rows_per_rank
        return own * ranks if spread else own
    # Without metadata, rows count as split: every rank's are gathered.
    return rows * ranks if spread and metadata is None else rows


def rows_of_engines(rows: int) -> DPMetadata:
    """What every data-parallel engine brings, known to all; int32 `[engines]`, on the host."""
    group = get_dp_group()
    counts = torch.zeros(group.world_size, dtype=torch.int32)
    counts[group.rank_in_group] = rows
    dist.all_reduce(counts, group=group.cpu_group)
    return DPMetadata(counts)


def gather_from_engines(hidden: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All engines' rows, and what the router says of them; `[rows of all engines, ...]` each."""
    gathered = get_ep_group().dispatch_router_logits(hidden, logits, is_sequence_parallel=False)
    return gathered[0], gathered[1]


def scatter_to_engines(hidden: torch.Tensor) -> torch.Tensor:
    """The sum over engines of what their experts gave for this engine's rows."""
    return get_ep_group().combine(hidden, is_sequence_parallel=False)
