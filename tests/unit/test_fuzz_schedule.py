"""The fuzzer's random steps are ones that ranks can run, and all kinds come."""

from __future__ import annotations

from collections import Counter

from fuzz_dp.schedule import KINDS, LIMIT, REQUESTS, Action, Step, steps
from hypothesis import given
from hypothesis import strategies as st

RANKS = st.integers(1, 8)
SEEDS = st.integers(0, 2**31)


class _Rank:
    """One rank's requests as the steps go on; rejects what no rank could run."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.done: set[int] = set()
        self.lengths: dict[int, int] = {}

    def run(self, action: Action) -> None:
        for request in action.ended:
            self.done.remove(request)
            del self.rows[request]
        assert set(action.running) in (set(), self.done)
        for request in action.running:
            self.rows[request] += 1
            assert self.rows[request] <= LIMIT
        for i, piece in enumerate(action.pieces):
            assert self.rows.get(piece.request, 0) == piece.begin < piece.end <= piece.length
            assert self.lengths.setdefault(piece.request, piece.length) == piece.length
            assert piece.last or i == len(action.pieces) - 1, "only the last prompt of a batch is cut"
            self.rows[piece.request] = piece.end
            if piece.last:
                self.done.add(piece.request)
        assert len(self.rows) <= REQUESTS


@given(RANKS, SEEDS)
def test_ranks_can_run_them(ranks: int, seed: int) -> None:
    states = [_Rank() for _ in range(ranks)]
    for step in steps(ranks, 60, seed):
        assert len(step) == ranks and any(action.rows for action in step)
        kinds = {action.kind for action in step}
        assert "verify" not in kinds or kinds <= {"verify", "idle"}
        for state, action in zip(states, step, strict=True):
            assert (action.rows == 0) == (action.kind == "idle")
            state.run(action)


@given(RANKS, SEEDS)
def test_the_same_seed_gives_the_same_steps(ranks: int, seed: int) -> None:
    assert list(steps(ranks, 40, seed)) == list(steps(ranks, 40, seed))
    shorter: list[Step] = list(steps(ranks, 15, seed))
    assert shorter == list(steps(ranks, 40, seed))[:15]


def test_every_kind_comes_and_beside_every_other() -> None:
    together = Counter(frozenset(action.kind for action in step) for step in steps(2, 500, 0))
    assert {kind for kinds in together for kind in kinds} == set(KINDS)
    for kinds in (("extend", "idle"), ("extend", "decode"), ("decode", "idle"), ("verify", "idle"), ("mixed", "idle")):
        assert together[frozenset(kinds)] >= 10, kinds
