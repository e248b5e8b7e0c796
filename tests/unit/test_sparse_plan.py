"""Plans of sparse attention: every row once, within bounds, over its own request's tokens, wherever their pages lie."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.sparse_plan import (
    Workspace,
    boundaries,
    owners_of,
    page_table,
    pages_for,
    prefill_groups,
    selection_rows,
    visible_lengths,
)

Batch = list[tuple[int, int]]

#: Requests by how many tokens they had before and how many are new.
batches = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=6)
workspaces = st.builds(Workspace, st.integers(1, 4000), st.integers(1, 100), st.integers(1, 8), st.integers(0, 40))


@given(batches, workspaces)
def test_groups_and_chunks(batch: Batch, workspace: Workspace) -> None:
    counts, lengths = [new for _, new in batch], [old + new for old, new in batch]
    groups = prefill_groups(counts, lengths, workspace)
    chunks = [chunk for group in groups for chunk in group.chunks]
    covered = [row for begin, end in chunks for row in range(begin, end)]
    assert covered == list(range(sum(counts))), "every row once, in order"
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    for group in groups:
        assert group.keys == sum(lengths[group.first : group.last])
        assert starts[group.first] == group.chunks[0][0], "a group's rows are those of its requests"
        assert starts[group.last] == group.chunks[-1][1]
        for begin, end in group.chunks:
            held = group.keys * workspace.per_key + (end - begin) * (
                workspace.per_row + group.keys * workspace.per_pair
            )
            assert held <= workspace.budget or end - begin == 1
    for before, after in pairwise(groups):
        assert before.last <= after.first


@given(batches)
def test_what_rows_see(batch: Batch) -> None:
    counts, lengths = torch.tensor([new for _, new in batch]), torch.tensor([old + new for old, new in batch])
    rows = int(counts.sum())
    owners = owners_of(counts, rows)
    visible = visible_lengths(owners, counts, lengths)
    expected = [(i, old + j + 1) for i, (old, new) in enumerate(batch) for j in range(new)]
    assert list(zip(owners.tolist(), visible.tolist(), strict=True)) == expected
    assert boundaries(lengths).tolist() == [0, *lengths.cumsum(0).tolist()]


@given(st.data(), st.sampled_from([1, 4, 64]), st.integers(1, 5))
def test_pages_say_where_each_token_lies(data: st.DataObject, page: int, requests: int) -> None:
    tokens = data.draw(st.lists(st.integers(1, 3 * page + 2), min_size=requests, max_size=requests))
    width = max(tokens) + data.draw(st.integers(0, 7))
    spare = iter(data.draw(st.permutations(range(1, 1 + sum(pages_for(n, page) for n in tokens)))))
    slots_of = torch.full((requests + 2, width), 10**6, dtype=torch.int32)
    for line, count in enumerate(tokens):
        for first in range(0, count, page):
            size = min(page, count - first)
            slots_of[line, first : first + size] = next(spare) * page + torch.arange(size, dtype=torch.int32)
    lines = torch.tensor(data.draw(st.permutations(range(requests))))
    table = page_table(slots_of, lines, pages_for(max(tokens), page), page)
    assert table.shape == (requests, pages_for(max(tokens), page))
    for i, line in enumerate(lines.tolist()):
        position = torch.arange(tokens[line])
        slots = table[i].long()[position // page] * page + position % page
        assert slots.tolist() == slots_of[line, : tokens[line]].tolist()


def test_a_page_of_one_token_needs_no_copy() -> None:
    slots_of = torch.arange(12, dtype=torch.int32).view(3, 4)
    table = page_table(slots_of, None, 3, 1)
    assert table.data_ptr() == slots_of.data_ptr()
    assert table.tolist() == slots_of[:, :3].tolist()


@given(st.integers(1, 4096), st.integers(1, 8), st.integers(0, 16384))
def test_rows_of_the_buffer(running: int, per_request: int, prefill: int) -> None:
    rows = selection_rows(running, per_request, prefill)
    assert rows >= prefill
    assert rows >= running * per_request
    assert rows in (prefill, running * per_request)
