"""Find where ranks' recorded sequences part. Pure functions over entries; knows no engine and no torch.

Two ranks agree if, of the collectives of the groups that both are in, they entered the same ones in the same order, and
if every message that one sent was received by the other. That holds for every pair exactly if no rank waits for one
that is elsewhere; ranks that share no group owe each other nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorder import Entry

MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Divergence:
    """The first place where two ranks entered different things.

    Attributes:
        ranks: the two.
        position: the index among what the two owe each other.
        entries: what each entered there; None: nothing more.
        kind: "collective" or "message".
    """

    ranks: tuple[int, int]
    position: int
    entries: tuple[Entry | None, Entry | None]
    kind: str

    def __str__(self) -> str:
        lines = [f"ranks {self.ranks[0]} and {self.ranks[1]} part at {self.kind} {self.position}:"]
        for rank, entry in zip(self.ranks, self.entries, strict=True):
            lines.append(
                f"  rank {rank}: {entry or 'nothing more'}" + (f"\n          at {entry.site}" if entry else "")
            )
        return "\n".join(lines)


def divergence(sequences: Mapping[int, Sequence[Entry]]) -> Divergence | None:
    """The earliest parting of any two ranks, or None."""
    found: list[Divergence] = []
    for first, second in combinations(sorted(sequences), 2):
        for parting in (_collectives, _messages):
            if (part := parting(first, second, sequences)) is not None:
                found.append(part)
    return min(found, key=lambda part: part.position, default=None)


def _collectives(first: int, second: int, sequences: Mapping[int, Sequence[Entry]]) -> Divergence | None:
    shared = [
        [entry for entry in sequences[rank] if entry.operation not in MESSAGES and {first, second} <= set(entry.ranks)]
        for rank in (first, second)
    ]
    for position in range(max(map(len, shared))):
        mine, theirs = (entries[position] if position < len(entries) else None for entries in shared)
        if mine is None or theirs is None or not agree(mine, theirs, first, second):
            return Divergence((first, second), position, (mine, theirs), "collective")
    return None


def agree(mine: Entry, theirs: Entry, first: int, second: int) -> bool:
    """Whether two ranks' entries belong to one collective."""
    key = lambda entry: (entry.operation, entry.group, entry.ranks, entry.shape, entry.dtype, entry.agreed)  # noqa: E731
    if key(mine) != key(theirs) or bool(mine.sent) != bool(theirs.sent):
        return False
    if not mine.sent:
        return True
    here, there = mine.ranks.index(first), mine.ranks.index(second)
    return mine.sent[there] == theirs.received[here] and theirs.sent[here] == mine.received[there]


def _messages(first: int, second: int, sequences: Mapping[int, Sequence[Entry]]) -> Divergence | None:
    for sender, receiver in ((first, second), (second, first)):
        sent = [entry for entry in sequences[sender] if entry.operation == "send" and entry.peer == receiver]
        received = [entry for entry in sequences[receiver] if entry.operation == "recv" and entry.peer == sender]
        key = lambda entry: (entry.group, entry.shape, entry.dtype, entry.agreed)  # noqa: E731
        for position in range(max(len(sent), len(received))):
            out = sent[position] if position < len(sent) else None
            back = received[position] if position < len(received) else None
            if out is None or back is None or key(out) != key(back):
                return Divergence((sender, receiver), position, (out, back), "message")
    return None
