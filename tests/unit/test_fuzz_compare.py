"""Where ranks' sequences part is found, and nothing else is."""

from __future__ import annotations

import pytest
from fuzz_dp.compare import divergence
from fuzz_dp.recorder import Entry
from hypothesis import given
from hypothesis import strategies as st

ALL = (0, 1, 2)


def reduce(rows: int = 4, group: str = "tp", ranks: tuple[int, ...] = ALL, **more: object) -> Entry:
    return Entry("allreduce", group, ranks, (rows, 8), "float32", ("sum",), **more)  # type: ignore[arg-type]


def message(operation: str, peer: int, rows: int = 4) -> Entry:
    return Entry(operation, "tp", ALL, (rows, 8), "float32", ("tag 0",), peer=peer)


ENTRIES = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([ALL, (0, 1), (1, 2)])).map(
        lambda drawn: reduce(drawn[0], str(drawn[1]), drawn[1])
    )
)


def of(rank: int, entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if rank in entry.ranks]


@given(ENTRIES)
def test_members_that_enter_the_same_agree(entries: list[Entry]) -> None:
    assert divergence({rank: of(rank, entries) for rank in ALL}) is None


@given(ENTRIES, st.data())
def test_one_rank_without_one_collective_parts(entries: list[Entry], data: st.DataObject) -> None:
    entries.append(reduce(9))
    missing = data.draw(st.integers(0, len(entries) - 1))
    rank = data.draw(st.sampled_from(entries[missing].ranks))
    sequences = {other: of(other, entries) for other in ALL}
    sequences[rank] = of(rank, entries[:missing] + entries[missing + 1 :])
    # Without it the rest may happen to be what the others enter, but then it is one too few.
    found = divergence(sequences)
    assert found is not None and rank in found.ranks
    assert "part at collective" in str(found)


@pytest.mark.parametrize(
    "other",
    [
        reduce(5),
        reduce(group="dp"),
        Entry("allreduce", "tp", ALL, (4, 8), "bfloat16", ("sum",)),
        Entry("allreduce", "tp", ALL, (4, 8), "float32", ("max",)),
        Entry("_allgather_base", "tp", ALL, (4, 8), "float32", ("sum",)),
    ],
    ids=["shape", "group", "type", "reduction", "operation"],
)
def test_what_must_agree(other: Entry) -> None:
    assert divergence({0: [reduce()], 1: [reduce()], 2: [other]}) is not None


def test_the_lines_that_asked_need_not_agree() -> None:
    assert divergence({0: [reduce(site="a.py:1")], 1: [reduce(site="b.py:2")], 2: [reduce()]}) is None


def test_ranks_without_a_common_group_owe_each_other_nothing() -> None:
    assert divergence({0: [reduce(ranks=(0,))] * 3, 1: [reduce(ranks=(1, 2))], 2: [reduce(ranks=(1, 2))]}) is None


def test_rows_sent_are_rows_received() -> None:
    def exchange(sent: tuple[int, int], received: tuple[int, int]) -> Entry:
        return Entry("alltoall_base", "ep", (0, 1), (8,), "float32", sent=sent, received=received)

    assert divergence({0: [exchange((1, 2), (1, 5))], 1: [exchange((5, 3), (2, 3))]}) is None
    assert divergence({0: [exchange((1, 2), (1, 5))], 1: [exchange((5, 3), (4, 3))]}) is not None


def test_messages_need_their_other_end() -> None:
    assert divergence({0: [message("send", 1)], 1: [message("recv", 0)]}) is None
    for end in ([], [message("recv", 0, rows=3)], [message("recv", 2)]):
        found = divergence({0: [message("send", 1)], 1: end, 2: []})
        assert found is not None and found.kind == "message"


def test_the_first_parting_is_reported_with_its_lines() -> None:
    found = divergence({0: [reduce(), reduce(2, site="a.py:7 f")], 1: [reduce(), reduce(3, site="b.py:9 g")]})
    assert found is not None and found.position == 1
    assert "a.py:7 f" in str(found) and "b.py:9 g" in str(found) and "[2, 8]" in str(found)
