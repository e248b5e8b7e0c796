"""Two servers' greedy answers to the same prompts, held against each other place by place.

After the first token that differs the two continue different texts, so nothing behind it is compared. Which of two
nearly equal tokens comes first is rounding's choice: at that place the log-probabilities of both are held against each
other, as those of equal tokens are before it. If they are close, the place is a tie and no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Token = int | str
"""Its id, or its text where a server gives none."""

CANDIDATES = 5
"""Of each place, the likeliest tokens that are asked for: as many as OpenAI's interface gives."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        logprobs: of each token.
        candidates: of each place, the likeliest tokens and their log-probabilities; none where the server did not say.
    """

    tokens: list[Token]
    logprobs: list[float]
    candidates: list[list[tuple[Token, float]]]

    def logprob(self, place: int, token: Token) -> float | None:
        """What `token` has there; None if it is no candidate."""
        return next((logprob for one, logprob in self.candidates[place] if one == token), None)


@dataclass(frozen=True)
class Parting:
    """Where two answers part.

    Attributes:
        margin: how much likelier stock's token was than overlay's, to the stock server; None if that was no candidate.
        apart: how far the two servers' log-probabilities of the two tokens are apart at most, or a server's token is
            behind the other to that server; None if one of them was no candidate.
    """

    place: int
    stock: Token
    overlay: Token
    margin: float | None = None
    apart: float | None = None

    @property
    def why(self) -> str:
        """For people."""
        if "" in (self.stock, self.overlay):
            return "one answer ends there"
        if self.margin is None:
            return "the one is no candidate of the other server"
        apart = "of unknown distance" if self.apart is None else f"{self.apart:.4f} apart"
        return f"{self.margin:.4f} less likely to the stock server, log-probabilities {apart}"


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
        if found is None or (found.apart is not None and found.apart <= tolerance):
            return ""
        return f"token {found.place} is {found.overlay!r}, not {found.stock!r}: {found.why}"


def match(stock: Answer, overlay: Answer) -> Match:
    """Compare two answers."""
    length = max(len(stock.tokens), len(overlay.tokens))
    gaps: list[float] = []
    for place in range(min(len(stock.tokens), len(overlay.tokens))):
        one, other = stock.tokens[place], overlay.tokens[place]
        if one != other:
            return Match(gaps, length, _parting(stock, overlay, place))
        gaps.append(_apart(stock.logprobs[place], overlay.logprobs[place]))
    if len(stock.tokens) == len(overlay.tokens):
        return Match(gaps, length)
    return Match(gaps, length, Parting(len(gaps), _at(stock, len(gaps)), _at(overlay, len(gaps))))


def _parting(stock: Answer, overlay: Answer, place: int) -> Parting:
    one, other = stock.tokens[place], overlay.tokens[place]
    second, first = stock.logprob(place, other), overlay.logprob(place, one)
    margin = None if second is None else stock.logprobs[place] - second
    if second is None or first is None:
        return Parting(place, one, other, margin)
    # That each took what is likeliest to itself is no more than what greedy answers are, and is looked at, too.
    apart = _apart(stock.logprobs[place], first), _apart(second, overlay.logprobs[place])
    worse = second - stock.logprobs[place], first - overlay.logprobs[place]
    return Parting(place, one, other, margin, max(*apart, *worse))


def _apart(one: float, other: float) -> float:
    """How far two log-probabilities are apart; without end if they are no numbers."""
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance


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
