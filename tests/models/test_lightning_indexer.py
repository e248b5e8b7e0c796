"""The lightning indexer selects the tokens with the largest scores, and names the slots where they lie."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels.sparse_indexer import indexer_queries
from atom_patches.models.lightning_indexer import (
    IndexerShape,
    RaggedKeys,
    Selection,
    mix,
    rotate,
    select,
    write_keys,
)
from atom_patches.runtime.sparse_plan import (
    Workspace,
    boundaries,
    owners_of,
    page_table,
    pages_for,
    prefill_groups,
    visible_lengths,
)

SHAPE = IndexerShape(heads=2, head_size=32, rope_size=8, top_k=5, interleaved=False)
AMPLE = Workspace(1 << 24, 64)


class World:
    """Requests whose tokens lie in shuffled pages; each has one key, the last `new` of them have queries.

    Attributes:
        slots: of each request, where its tokens lie.
    """

    def __init__(self, batch: list[tuple[int, int]], page: int, shape: IndexerShape = SHAPE, seed: int = 0) -> None:
        self.shape, self.page = shape, page
        self.counts, self.lengths = [new for _, new in batch], [old + new for old, new in batch]
        generator = torch.Generator().manual_seed(seed)
        width = max(self.lengths) + 3
        total = sum(pages_for(n, page) for n in self.lengths)
        free = iter((torch.randperm(total, generator=generator) + 1).tolist())
        self.slots_of = torch.full((len(batch) + 1, width), (total + 1) * page, dtype=torch.int32)
        for line, count in enumerate(self.lengths):
            for first in range(0, count, page):
                size = min(page, count - first)
                self.slots_of[line, first : first + size] = next(free) * page + torch.arange(size, dtype=torch.int32)
        self.lines = torch.arange(len(batch))
        self.cache = torch.full((total + 2, page, shape.head_size + 4), 0xFF, dtype=torch.uint8)
        self.keys = [self._random(generator, n, shape.head_size) for n in self.lengths]
        rows = sum(self.counts)
        self.q = self._random(generator, rows, shape.heads, shape.head_size)
        self.gates = self._random(generator, rows, shape.heads)
        longest = max(self.lengths)
        angle = torch.rand(longest, shape.rope_size // 2, generator=generator) * math.pi
        self.cos, self.sin = angle.cos(), angle.sin()
        for line, key in enumerate(self.keys):
            at = torch.arange(len(key))
            write_keys(key, self.cos[at], self.sin[at], self.slots_of[line, at].long(), self.cache, shape)

    @staticmethod
    def _random(generator: torch.Generator, *size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n - c, n) for n, c in zip(self.lengths, self.counts, strict=True)])

    def selection(self, workspace: Workspace | None) -> Selection:
        """Gathered in groups that keep within `workspace`; None: read where the keys lie."""
        counts, lengths = torch.tensor(self.counts), torch.tensor(self.lengths)
        rows, longest = sum(self.counts), max(self.lengths)
        table = page_table(self.slots_of, self.lines, pages_for(longest, self.page), self.page)
        owners = owners_of(counts, rows)
        visible = visible_lengths(owners, counts, lengths)
        plan = Selection(rows, table, owners, visible, longest, None)
        if workspace is None:
            return plan
        bounds, ragged = boundaries(lengths), list[RaggedKeys]()
        for group in prefill_groups(self.counts, self.lengths, workspace):
            of_group = bounds[group.first : group.last + 1] - bounds[group.first]
            starts = bounds[owners.long()] - bounds[group.first]
            some = table[group.first : group.last]
            ragged.append(RaggedKeys(some, of_group, group.keys, group.chunks, starts, starts + visible))
        return replace(plan, ragged=tuple(ragged))

    def select(self, selection: Selection, workspace: Workspace = AMPLE, padding: int = 0) -> Tensor:
        at = self.positions()
        out = torch.full((len(at) + padding, self.shape.top_k), 7, dtype=torch.int32)
        select(self.q, self.gates, self.cos[at], self.sin[at], self.cache, selection, self.shape, workspace, out)
        return out

    def expected(self) -> list[list[int]]:
        """By hand, in float64 from what FP8 keeps: each row's best slots, as a set; ties go to the earlier token."""
        at = self.positions()
        q, weights = indexer_queries(self.q, self.gates, self.cos[at], self.sin[at])
        found: list[list[int]] = []
        row = 0
        for line, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            keys = torch.stack([self._read(int(self.slots_of[line, p])) for p in range(length)])
            for j in range(count):
                seen = keys[: length - count + j + 1]
                scores = (torch.relu(q[row].double() @ seen.T) * weights[row].double()[:, None]).sum(0)
                order = sorted(range(len(seen)), key=lambda p: (-scores[p].item(), p))[: self.shape.top_k]
                found.append(sorted(int(self.slots_of[line, p]) for p in order))
                row += 1
        return found

    def _read(self, slot: int) -> Tensor:
        block = self.cache[slot // self.page].flatten()
        place, size = slot % self.page, self.shape.head_size
        values = block[place * size : (place + 1) * size].view(torch.float8_e4m3fn)
        at = self.page * size + place * 4
        return values.double() * block[at : at + 4].clone().view(torch.float32).double()


def as_sets(slots: Tensor) -> list[list[int]]:
    return [sorted(slot for slot in row if slot >= 0) for row in slots.tolist()]


batches = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=4)


@settings(deadline=None)
@given(batches, st.sampled_from([1, 4]), st.integers(0, 3), st.integers(200, 3000))
def test_rows_select_the_largest_scores_of_their_request(
    batch: list[tuple[int, int]], page: int, seed: int, budget: int
) -> None:
    world = World(batch, page, seed=seed)
    expected = world.expected()
    tight = Workspace(budget, 64, per_key=36)
    for selection in (world.selection(None), world.selection(AMPLE), world.selection(tight)):
        assert as_sets(world.select(selection, tight)) == expected


@pytest.mark.parametrize("length", [1, SHAPE.top_k - 1, SHAPE.top_k, SHAPE.top_k + 1])
@pytest.mark.parametrize("ragged", [True, False])
def test_what_is_unused_is_negative_and_so_is_padding(length: int, ragged: bool) -> None:
    world = World([(length - 1, 1), (7, 1)], page=4)
    slots = world.select(world.selection(AMPLE if ragged else None), padding=2)
    assert (slots[0] >= 0).sum() == min(length, SHAPE.top_k)
    assert (slots[1] >= 0).sum() == SHAPE.top_k
    assert (slots[2:] == -1).all()


def test_rows_without_a_request_select_nothing() -> None:
    world = World([(9, 1), (9, 1)], page=4)
    plan = world.selection(None)
    slots = world.select(replace(plan, requests=torch.tensor([-1, 1], dtype=torch.int32)))
    assert (slots[0] == -1).all()
    assert as_sets(slots)[1] == world.expected()[1]


def test_a_line_of_the_table_for_every_row() -> None:
    world = World([(9, 1), (4, 1), (12, 1)], page=4)
    tight = Workspace(1, 64)
    assert as_sets(world.select(replace(world.selection(None), requests=None), tight)) == world.expected()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_depends_on_the_distance_alone(interleaved: bool) -> None:
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64).float()
    frequency = torch.tensor([1.0, 0.3])

    def at(x: Tensor, position: int) -> Tensor:
        angle = position * frequency[None]
        return rotate(x, angle.cos(), angle.sin(), interleaved)

    assert torch.allclose((at(q, 5) * at(k, 3)).sum(), (at(q, 12) * at(k, 10)).sum(), atol=1e-5)
    assert not torch.allclose((at(q, 5) * at(k, 3)).sum(), (at(q, 5) * at(k, 4)).sum(), atol=1e-3)
    assert torch.equal(at(q, 5)[..., 4:], q[..., 4:])


def test_rotation_turns_halves_or_neighbours() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 9.0]]])
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    assert rotate(x, cos, sin, False).flatten().tolist() == [0, 0, 1, 0, 9]
    assert rotate(x, cos, sin, True).flatten().tolist() == [0, 1, 0, 0, 9]


def test_mixing_leaves_products_as_they_are() -> None:
    q, k = torch.randn(2, 6, 64)
    assert torch.allclose(mix(q) @ mix(k).T, q @ k.T, atol=1e-4)
    one = torch.zeros(64)
    one[3] = 1.0
    assert torch.allclose(mix(one).abs(), torch.full((64,), 1 / 8))
    with pytest.raises(ValueError, match="power of two"):
        mix(torch.randn(2, 12))


def test_scales_are_inside_the_weights() -> None:
    q, gates = torch.randn(3, 2, 32), torch.randn(3, 2)
    cos, sin = torch.ones(3, 4), torch.zeros(3, 4)
    quantised, weights = indexer_queries(q, gates, cos, sin)
    plain = torch.relu(mix(q) @ mix(torch.ones(32))) * gates
    rebuilt = torch.relu(quantised.float() @ mix(torch.ones(32))) * weights * (2 * 32) ** 0.5
    assert torch.allclose(rebuilt, plain, atol=0.3, rtol=0.1)
