"""All ranks choose the same experts for the rows that each of them runs; in threads, with vLLM's forward context."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from atom_patches.vllm.adapters import pcp_graphs, pcp_routing, pcp_step  # noqa: E402
from atom_patches.vllm.pcp import moe_dispatch  # noqa: E402
from tests.vllm.ranks_in_threads import Group, run_ranks  # noqa: E402


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_first_ranks_scores_count(monkeypatch: pytest.MonkeyPatch, contiguous: bool) -> None:
    groups: dict[int, Group] = {}
    monkeypatch.setattr(pcp_routing, "get_pcp_group", lambda: groups[threading.get_ident()])
    monkeypatch.setattr(pcp_graphs, "rows_are_whole", lambda: True)

    def never(*args: Any) -> Any:
        raise AssertionError("rows were gathered that every rank has")

    def work(group: Group) -> tuple[Any, Any, Any]:
        groups[threading.get_ident()] = group
        own = torch.arange(12.0).view(3, 4) + 100 * group.rank_in_group
        own = own if contiguous else own.t().contiguous().t()
        before, hidden = own.clone(), torch.zeros(3, 8)
        dispatch = moe_dispatch.gather_split_rows_only(never)
        runner: Any = SimpleNamespace(moe_config=SimpleNamespace(pcp_size=group.world_size))
        rows, scores = dispatch(runner, torch.nn.Module(), hidden, own)
        assert rows is hidden
        return before, own, scores

    results = run_ranks(3, work)
    for before, own, scores in results:
        assert torch.equal(scores, results[0][0])
        assert torch.equal(own, before), "the scores may be an input of the operation, which does not change them"


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(2, 5),
    rows=st.integers(1, 12),
    room=st.integers(1, 16),
    copies=st.integers(0, 12),
)
def test_copies_of_a_row_have_the_first_ranks_scores(ranks: int, rows: int, room: int, copies: int) -> None:
    copies = min(copies, rows, room)
    scores = torch.arange(ranks * rows * 3.0).view(-1, 3)
    found = scores.clone()
    pcp_routing.agree_on_copies(found, ranks, torch.arange(room) < copies)
    for rank in range(ranks):
        for row in range(rows):
            of = 0 if row < copies else rank
            assert torch.equal(found[rank * rows + row], scores[of * rows + row])


def test_a_split_step_gathers_and_agrees_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcp_graphs, "rows_are_whole", lambda: False)
    monkeypatch.setattr(pcp_step, "current_split_step", lambda: None)
    runner: Any = SimpleNamespace(moe_config=SimpleNamespace(pcp_size=2))
    scores = torch.arange(8.0).view(4, 2)
    for copies, wanted in ((None, [0, 2, 4, 6]), (torch.tensor([True, False]), [0, 2, 0, 6])):
        monkeypatch.setattr(pcp_graphs, "current_copies", lambda copies=copies: copies)
        dispatch = moe_dispatch.gather_split_rows_only(lambda *args: (torch.zeros(4, 1), scores.clone()))
        _, found = dispatch(runner, torch.nn.Module(), torch.zeros(2, 1), scores[:2])
        assert found[:, 0].tolist() == wanted
