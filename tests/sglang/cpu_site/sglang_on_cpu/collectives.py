"""Collectives of unequal sizes, which SGLang has through NCCL alone: the same over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_on_cpu.after_import import replace


def reduce_scatterv(group: Any, input_: Any, output: Any = None, sizes: Sequence[int] | None = None) -> Any:
    """The sum over ranks of the rows that are this rank's."""
    import torch.distributed as dist

    counts = list(sizes or [input_.shape[0] // group.world_size] * group.world_size)
    total = input_.clone()
    dist.all_reduce(total, group=group.device_group)
    begin = sum(counts[: group.rank_in_group])
    mine = total[begin : begin + counts[group.rank_in_group]]
    return mine.contiguous() if output is None else output.copy_(mine)


def all_gatherv(group: Any, input_: Any, sizes: Sequence[int] | None = None, output: Any = None) -> Any:
    """Every rank's rows, one rank's after the other's."""
    import torch
    import torch.distributed as dist

    if isinstance(input_, list):
        return [all_gatherv(group, each, sizes) for each in input_]
    counts = list(sizes or [input_.shape[0]] * group.world_size)
    padded = input_.new_zeros((max(1, *counts), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group.device_group)
    rows = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return rows if output is None else output.copy_(rows)


def install() -> None:
    state = "sglang.srt.distributed.parallel_state"
    replace(state, "GroupCoordinator.reduce_scatterv", lambda original: reduce_scatterv)
    replace(state, "GroupCoordinator.all_gatherv", lambda original: all_gatherv)
