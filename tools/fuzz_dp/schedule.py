"""Random steps for N data-parallel ranks, as a scheduler could ask for them. Pure; the same seed gives the same steps.

Every step says for every rank what it runs: nothing (it idles while others work), new rows of prompts, one row of every
running request, both at once, or the verification of a draft. A step of drafts has verifying and idle ranks only: with
speculation, SGLang lets no rank prefill beside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

REQUESTS = 4  # running on one rank at the same time
PROMPT = 24  # rows of the longest prompt
LIMIT = 48  # rows after which a request ends
DRAFT = 3  # rows of a verified draft
KINDS = ("idle", "extend", "decode", "mixed", "verify")


@dataclass(frozen=True)
class Piece:
    """Rows `begin` to `end` of one request's prompt of `length` rows."""

    request: int
    begin: int
    end: int
    length: int

    @property
    def last(self) -> bool:
        return self.end == self.length


@dataclass(frozen=True)
class Action:
    """What one rank runs in one step.

    Attributes:
        kind: one of KINDS.
        pieces: of prompts, for "extend" and "mixed".
        ended: requests that are released before the step.
        running: requests that give one row, or one draft, each; for the reader and for checks.
    """

    kind: str
    pieces: tuple[Piece, ...] = ()
    ended: tuple[int, ...] = ()
    running: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        mine = {"decode": 1, "mixed": 1, "verify": DRAFT}.get(self.kind, 0) * len(self.running)
        return mine + sum(piece.end - piece.begin for piece in self.pieces)

    def __str__(self) -> str:
        return self.kind if self.kind == "idle" else f"{self.kind} of {self.rows}"


Step = tuple[Action, ...]


@dataclass
class _Rank:
    """One rank's requests, as its scheduler sees them."""

    random: random.Random
    running: dict[int, int] = field(default_factory=dict)  # request -> rows in the cache
    chunked: tuple[int, int, int] | None = None  # request, rows done, rows of the prompt
    made: int = 0

    def may(self, kind: str) -> bool:
        if kind in ("decode", "verify"):
            return bool(self.running)
        if kind == "mixed":
            return bool(self.running) and self.may("extend")
        return kind == "idle" or self.chunked is not None or len(self.running) < REQUESTS

    def end(self) -> tuple[int, ...]:
        full = {request for request, rows in self.running.items() if rows + DRAFT > LIMIT}
        some = {request for request in self.running if self.random.random() < 0.15}
        ended = tuple(sorted(full | some))
        for request in ended:
            del self.running[request]
        return ended

    def act(self, kind: str, ended: tuple[int, ...]) -> Action:
        running = tuple(self.running) if kind in ("decode", "mixed", "verify") else ()
        pieces = self._pieces() if kind in ("extend", "mixed") else ()
        for request in running:
            self.running[request] += 1  # of a draft one row is kept
        for piece in pieces:
            if piece.last:
                self.running[piece.request] = piece.end
        return Action(kind, pieces, ended, running)

    def _pieces(self) -> tuple[Piece, ...]:
        """The rest, or more, of the prompt that was cut last time; then new prompts, of which the last may be cut."""
        pieces: list[Piece] = []
        if self.chunked is not None:
            request, done, length = self.chunked
            pieces.append(self._piece(request, done, length))
        room = REQUESTS - len(self.running) - 1
        if self.chunked is None:
            for _ in range(self.random.randint(0 if pieces else 1, max(1, min(room + 1, 2)))):
                if self.chunked is not None or len(self.running) + len(pieces) >= REQUESTS:
                    break
                self.made += 1
                pieces.append(self._piece(self.made, 0, self.random.choice((1, 2, 3, 5, 8, PROMPT))))
        return tuple(pieces)

    def _piece(self, request: int, done: int, length: int) -> Piece:
        end = self.random.randint(done + 1, length) if self.random.random() < 0.3 else length
        self.chunked = None if end == length else (request, end, length)
        return Piece(request, done, end, length)


MOODS: Sequence[dict[str, float]] = (
    {"idle": 3, "extend": 4, "decode": 3, "mixed": 3},  # anything beside anything
    {"idle": 3, "extend": 4, "decode": 3, "mixed": 3},
    {"idle": 1, "decode": 4},  # what may take the uniform path
    {"idle": 5, "extend": 1},  # one busy rank, the others idle
    {"idle": 2, "verify": 3},
)


def steps(ranks: int, count: int, seed: int) -> Iterator[Step]:
    """`count` steps, each with something to run on at least one rank."""
    dice = random.Random(seed)
    state = [_Rank(random.Random(dice.random())) for _ in range(ranks)]
    for _ in range(count):
        mood = dice.choice(MOODS)
        ended = [rank.end() for rank in state]
        kinds = [_kind(dice, mood, rank) for rank in state]
        if set(kinds) == {"idle"}:
            busy = dice.randrange(ranks)
            kinds[busy] = "verify" if "verify" in mood and state[busy].running else _work(state[busy])
        yield tuple(rank.act(kind, end) for rank, kind, end in zip(state, kinds, ended, strict=True))


def _kind(dice: random.Random, mood: dict[str, float], rank: _Rank) -> str:
    possible = [kind for kind in mood if rank.may(kind)]
    if not possible:
        return "idle"
    return dice.choices(possible, [mood[kind] for kind in possible])[0]


def _work(rank: _Rank) -> str:
    return "extend" if rank.may("extend") else "decode"
