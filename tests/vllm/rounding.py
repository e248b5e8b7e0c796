"""How far apart two engines' answers are, where both may round differently, but nothing else.

Log-probabilities are compared wherever both engines have seen the same tokens. Greedy tokens are equal up to the first
place where two candidates are nearly as likely; what follows that fork is another text and is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Positions = list[dict[str, float] | None]


@dataclass
class Distance:
    """What was seen of the requests compared so far.

    Attributes:
        gaps: differences of log-probabilities of the same token at the same place.
        forks: where tokens differ, how much likelier the expected one was, by the expected engine.
        tokens: generated tokens, and of these, those before or at a fork.
    """

    gaps: list[float] = field(default_factory=list)
    forks: list[float] = field(default_factory=list)
    tokens: int = 0
    compared: int = 0

    @property
    def worst(self) -> float:
        return max(self.gaps, default=0.0)

    @property
    def mean(self) -> float:
        return sum(self.gaps) / max(len(self.gaps), 1)

    def __str__(self) -> str:
        return (
            f"{len(self.gaps)} log-probabilities, worst {self.worst:.4f}, mean {self.mean:.5f}; "
            f"{self.compared} of {self.tokens} tokens, forks {[round(fork, 4) for fork in self.forks]}"
        )

    def add(self, got: dict[str, Any], expected: dict[str, Any]) -> None:
        """Compare one request's answers."""
        self._add_positions(got["prompt_logprobs"], expected["prompt_logprobs"])
        for one, other in zip(got["samples"], expected["samples"], strict=True):
            assert len(one["tokens"]) == len(other["tokens"])
            self.tokens += len(other["tokens"])
            fork = _fork(one["tokens"], other["tokens"])
            same = len(other["tokens"]) if fork is None else fork + 1
            self.compared += same
            self._add_positions(one["logprobs"][:same], other["logprobs"][:same])
            if fork is not None:
                likely = other["logprobs"][fork]
                least = min(likely.values())
                self.forks.append(likely[str(other["tokens"][fork])] - likely.get(str(one["tokens"][fork]), least))

    def _add_positions(self, got: Positions, expected: Positions) -> None:
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            if one is None or other is None:
                assert one is other, "only one of them has log-probabilities here"
                continue
            common = one.keys() & other.keys()
            assert common, "not one token is likely in both"
            self.gaps += [abs(one[token] - other[token]) for token in common]


def _fork(one: list[int], other: list[int]) -> int | None:
    pairs = zip(one, other, strict=True)
    return next((place for place, (first, second) in enumerate(pairs) if first != second), None)


def distance(got: list[Any], expected: list[Any]) -> Distance:
    """Compare the answers of one wave; an aborted request has none."""
    seen = Distance()
    for one, other in zip(got, expected, strict=True):
        if one is None or other is None:
            assert one is other, "only one engine finished this request"
        else:
            seen.add(one, other)
    return seen
