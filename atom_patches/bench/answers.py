"""Two servers' greedy answers to the same prompts, held against each other place by place.

After the first token that differs the two continue different texts, so nothing behind it is compared. Which of two
tokens as likely as each other comes first is rounding's choice: such a place is a tie and no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Token = int | str
"""Its id, or its text where a server gives none."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        logprobs: of each token.
        margins: how much likelier the best candidate was than the second; None where the server did not say.
    """

    tokens: list[Token]
    logprobs: list[float]
    margins: list[float | None]


@dataclass(frozen=True)
class Parting:
    """Where two answers part.

    Attributes:
        margin: in the stock server's answer.
    """

    place: int
    stock: Token
    overlay: Token
    margin: float | None


@dataclass(frozen=True)
class Match:
    """Two answers to one prompt.

    Attributes:
        gaps: how far the log-probabilities are apart at each place before the answers part.
        length: of the longer answer.
    """

    gaps: list[float]
    length: int
    parting: Parting | None = None

    def wrong(self, tolerance: float) -> str:
        """What rounding does not explain; empty if nothing."""
        if (worst := max(self.gaps, default=0.0)) > tolerance:
            return f"log-probabilities are {worst:.4f} apart at token {self.gaps.index(worst)}"
        found = self.parting
        if found is None or (found.margin is not None and found.margin <= tolerance):
            return ""
        margin = "of unknown margin" if found.margin is None else f"{found.margin:.4f} likelier than the next"
        return f"token {found.place} is {found.overlay!r}, not {found.stock!r}, which is {margin}"


def match(stock: Answer, overlay: Answer) -> Match:
    """Compare two answers."""
    length = max(len(stock.tokens), len(overlay.tokens))
    gaps: list[float] = []
    for place in range(min(len(stock.tokens), len(overlay.tokens))):
        one, other = stock.tokens[place], overlay.tokens[place]
        if one != other:
            return Match(gaps, length, Parting(place, one, other, stock.margins[place]))
        gaps.append(abs(stock.logprobs[place] - overlay.logprobs[place]))
    if len(stock.tokens) == len(overlay.tokens):
        return Match(gaps, length)
    return Match(gaps, length, Parting(len(gaps), _at(stock, len(gaps)), _at(overlay, len(gaps)), None))


def _at(answer: Answer, place: int) -> Token:
    return answer.tokens[place] if place < len(answer.tokens) else ""


@dataclass(frozen=True)
class Comparison:
    """All answers."""

    matches: list[Match]
    tolerance: float
    wrong: list[str] = field(init=False)

    def __post_init__(self) -> None:
        found = ((number, one.wrong(self.tolerance)) for number, one in enumerate(self.matches, 1))
        object.__setattr__(self, "wrong", [f"prompt {number}: {why}" for number, why in found if why])

    @property
    def tokens(self) -> int:
        return sum(one.length for one in self.matches)

    @property
    def equal(self) -> int:
        """Tokens before answers part."""
        return sum(len(one.gaps) for one in self.matches)

    @property
    def worst(self) -> float:
        return max((gap for one in self.matches for gap in one.gaps), default=0.0)

    @property
    def mean(self) -> float:
        return sum(gap for one in self.matches for gap in one.gaps) / max(self.equal, 1)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        partings = [(number, one.parting) for number, one in enumerate(self.matches, 1) if one.parting is not None]
        return {
            "tokens": self.tokens,
            "equal": self.equal,
            "share": self.equal / max(self.tokens, 1),
            "logprob_worst": self.worst,
            "logprob_mean": self.mean,
            "tolerance": self.tolerance,
            "partings": [{"prompt": number, **vars(one)} for number, one in partings],
            "gaps": [one.gaps for one in self.matches],
        }


def compared(stock: Sequence[Answer], overlay: Sequence[Answer], tolerance: float) -> Comparison:
    """Compare all answers."""
    return Comparison([match(*pair) for pair in zip(stock, overlay, strict=True)], tolerance)
