"""The plan of one engine step on one of the ranks that run it together.

Under data-parallel attention ranks run different requests, and meet in the collectives around experts. A rank without
requests still has to meet them, so it runs one *physical* row that stands for nothing: its *logical* rows are 0.

Everything here follows from what all ranks know alike before the step, so that no rank decides alone, and none has to
ask the others:

- the rows of each rank, in which every 0 counts as the one row that this rank will run;
- the mode of the step as a whole, which says whether all ranks may take a path made for decoding;
- the captured sizes, of which all take the one that the largest rank needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class StepMode(Enum):
    """What a rank's rows are, or those of all ranks together."""

    EXTEND = "extend"  # prompts, or pieces of them
    DECODE = "decode"  # one new token for each request
    MIXED = "mixed"  # both; of all ranks together: not all the same
    IDLE = "idle"  # no request
    TARGET_VERIFY = "target_verify"  # drafted tokens, by the model that decides on them
    DRAFT_EXTEND = "draft_extend"  # accepted tokens, by the model that drafts


def global_mode(modes: Iterable[StepMode]) -> StepMode:
    """The mode of a step, from those of its ranks; idle ranks go along with whatever the others do."""
    busy = {mode for mode in modes if mode is not StepMode.IDLE}
    if len(busy) > 1:
        return StepMode.MIXED
    return busy.pop() if busy else StepMode.IDLE


def count_tokens(positions: torch.Tensor) -> int:
    """Rows that positions stand for: `[tokens]`, or `[3, tokens]` for positions in time, height and width."""
    return positions.shape[-1]


@dataclass(frozen=True)
class StepPlan:
    """One step on one rank; made by :meth:`of`.

    Attributes:
        mode: what this rank's rows are.
        global_mode: what those of all ranks are.
        logical_tokens: rows of this rank that stand for tokens, or that the engine already padded it to.
        tokens_across_ranks: physical rows of every rank, each at least 1, the same tuple on all of them.
        rank: this rank's place among them.
        graph_size: rows of the captured graph that every rank replays; None if there is none for all.
    """

    mode: StepMode
    global_mode: StepMode
    logical_tokens: int
    tokens_across_ranks: tuple[int, ...]
    rank: int
    graph_size: int | None

    @classmethod
    def of(
        cls,
        mode: StepMode,
        tokens: int,
        *,
        global_mode: StepMode | None = None,
        tokens_across_ranks: Sequence[int] | None = None,
        rank: int = 0,
        captured: Iterable[int] = (),
    ) -> StepPlan:
        """Plan a step.

        Args:
            mode: this rank's.
            tokens: rows that the engine hands to this rank's model, 0 on a rank without any.
            global_mode: of all ranks; None: unknown, or there is one rank.
            tokens_across_ranks: the rows that the engine hands to each rank; None: there is one rank.
            rank: this rank's place in `tokens_across_ranks`.
            captured: rows for which graphs of decoding were captured, the same on all ranks.

        Raises:
            ValueError: the numbers contradict each other.
        """
        across = (tokens,) if tokens_across_ranks is None else tuple(tokens_across_ranks)
        _check(mode, tokens, global_mode, across, rank)
        together = global_mode or (mode if len(across) == 1 else StepMode.MIXED)
        physical = tuple(max(1, count) for count in across)
        decoding = together is StepMode.DECODE
        size = _smallest_that_holds(max(physical), captured) if decoding else None
        return cls(mode, together, tokens, physical, rank, size)

    @property
    def physical_tokens(self) -> int:
        """Rows that this rank runs."""
        return self.tokens_across_ranks[self.rank]

    @property
    def needs_dummy(self) -> bool:
        """Whether this rank has to run a row that stands for nothing."""
        return self.logical_tokens == 0

    @property
    def uniform_decode(self) -> bool:
        """Whether every rank that has requests decodes them: all ranks may take a path made for that, or none does."""
        return self.global_mode is StepMode.DECODE

    def trim(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Without the row that stands for nothing; a view.

        Raises:
            ValueError: these are not this rank's physical rows.
        """
        if rows.shape[dim] != self.physical_tokens:
            raise ValueError(
                f"this rank runs {self.physical_tokens} physical rows, but the tensor to trim has {rows.shape[dim]} "
                f"in dimension {dim} ({list(rows.shape)})"
            )
        return rows.narrow(dim, 0, self.logical_tokens)


def _check(mode: StepMode, tokens: int, global_mode: StepMode | None, across: tuple[int, ...], rank: int) -> None:
    if tokens < 0 or any(count < 0 for count in across):
        raise ValueError(f"numbers of tokens are not negative: got {tokens} here, {across} across ranks")
    if not 0 <= rank < len(across):
        raise ValueError(f"rank {rank} is none of the {len(across)} whose tokens are {across}")
    if across[rank] != tokens:
        raise ValueError(f"rank {rank} has {tokens} tokens, but all ranks were told {across[rank]}: {across}")
    if tokens == 0 and mode is not StepMode.IDLE:
        raise ValueError(f"a rank without tokens is idle, but its mode is {mode.value!r}")
    alike = (None, StepMode.MIXED, mode)
    if mode is not StepMode.IDLE and global_mode not in alike:
        raise ValueError(f"this rank's mode is {mode.value!r}, so all ranks together are not {global_mode!r}")


def _smallest_that_holds(rows: int, sizes: Iterable[int]) -> int | None:
    return min((size for size in sizes if size >= rows), default=None)
