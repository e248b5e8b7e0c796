"""A recurrence cut over ranks and composed again, against one scan of everything in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels.gdn_chain import gdn_prefill, gdn_prefill_segment
from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_gdn import HaloExchange, entering_state, head_channels, ranks_that_go_on

HEADS, KEY, VALUE = 2, 4, 3
PAST = 3

query_lens = st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=8)
world_sizes = st.integers(2, 8)


def plan_of(lens: list[int], world_size: int) -> PcpPlan | None:
    return plan_step(lens, world_size, min_rows=1)


@dataclass
class Rule:
    """Rows of a gated delta rule; `decay` is kept near 1, so that what an early row wrote outlives many segments."""

    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor

    @classmethod
    def random(cls, rows: int, seed: int) -> Rule:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        k = torch.nn.functional.normalize(draw(rows, HEADS, KEY), dim=-1)
        return cls(k, draw(rows, HEADS, VALUE), draw(rows, HEADS).sigmoid(), 1 - 0.02 * draw(rows, HEADS).sigmoid())

    def scan(self, state: Tensor, rows: range, writes: bool = True) -> Tensor:
        """The state [heads, V or K, K] after `rows`."""
        for t in rows:
            state = state * self.decay[t, :, None, None]
            kept = (state @ self.k[t, :, :, None])[..., 0]
            wrong = (self.v[t] if writes else 0) - kept
            state = state + self.beta[t, :, None, None] * wrong[..., None] * self.k[t, :, None, :]
        return state


def first_pass(plan: PcpPlan, rule: Rule, own: Tensor) -> tuple[Tensor, Tensor]:
    """What the ranks send, in float32; what must not be read is not a number."""
    identity = torch.eye(KEY, dtype=torch.float64).expand(HEADS, KEY, KEY)
    ends = torch.full((plan.world_size, HEADS, VALUE, KEY), float("nan"))
    maps = torch.full((plan.world_size, HEADS, KEY, KEY), float("nan"))
    for rank in range(plan.world_size):
        if not plan.sends_state(rank):
            continue
        segment = plan.segments(rank)[-1]
        start = plan.query_start_loc[segment.request]
        rows = range(start + segment.start, start + segment.end)
        if segment.starts_request:
            state = own[plan.group_order[segment.request]]
        else:
            state = torch.zeros(HEADS, VALUE, KEY, dtype=torch.float64)
            maps[rank] = rule.scan(identity, rows, writes=False).float()
        ends[rank] = rule.scan(state, rows).float()
    return ends, maps


@settings(deadline=None, max_examples=60)
@given(query_lens, world_sizes, st.integers(0, 2**16))
def test_entering_states_are_those_of_one_scan(lens: list[int], world_size: int, seed: int) -> None:
    plan = plan_of(lens, world_size)
    if plan is None:
        return
    rule = Rule.random(sum(lens), seed)
    own = torch.randn(
        len(plan.pooled), HEADS, VALUE, KEY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    sent = first_pass(plan, rule, own)
    assert ranks_that_go_on(plan) == tuple(
        rank for rank in range(1, world_size) if plan.segments(rank) and plan.segments(rank)[0].start
    )
    for rank in ranks_that_go_on(plan):
        segment = plan.segments(rank)[0]
        start = plan.query_start_loc[segment.request]
        before = rule.scan(own[plan.group_order[segment.request]], range(start, start + segment.start))
        state = entering_state(plan, rank, *sent)
        assert state.dtype == torch.float32
        torch.testing.assert_close(state.double(), before, atol=1e-5, rtol=1e-5)


def test_what_the_first_rows_wrote_reaches_the_last_rank() -> None:
    """Without it the property above would hold for a composition that forgets."""
    plan = plan_of([80], 8)
    assert plan is not None
    rule = Rule.random(80, 1)
    own = torch.zeros(1, HEADS, VALUE, KEY, dtype=torch.float64)
    changed = Rule(rule.k, rule.v.clone(), rule.beta, rule.decay)
    changed.v[0] += 100
    states = [entering_state(plan, 7, *first_pass(plan, rows, own)) for rows in (rule, changed)]
    assert (states[0] - states[1]).abs().max() > 1e-3


@given(query_lens, world_sizes)
def test_every_rank_finds_the_rows_before_its_own(lens: list[int], world_size: int) -> None:
    """Each row carries its own name; a request's earlier rows are -1 (newest) to -PAST."""
    plan = plan_of(lens, world_size)
    if plan is None:
        return
    exchange = HaloExchange.of(plan, PAST)
    names = torch.tensor([(request, row) for request, rows in enumerate(lens) for row in range(rows)])
    hidden = [names[plan.local_rows(rank)] for rank in range(world_size)]
    assert len({len(rows) for rows in exchange.send_rows}) == 1
    sent = [hidden[rank][list(exchange.send_rows[rank])] for rank in range(world_size)]
    for rank in range(world_size):
        if rank not in ranks_that_go_on(plan):
            assert not len(exchange.halos[rank])
            continue
        first = plan.segments(rank)[0]
        earlier = torch.tensor([(first.request, row) for row in range(-PAST, 0)])
        expected = [[first.request, row] for row in range(first.start - PAST, first.start)]
        assert torch.cat([*sent, earlier])[exchange.halos[rank]].tolist() == expected


@given(query_lens, world_sizes)
def test_what_is_sent_depends_on_neither_requests_nor_lengths(lens: list[int], world_size: int) -> None:
    plan = plan_of(lens, world_size)
    if plan is not None:
        assert 1 <= len(HaloExchange.of(plan, PAST).send_rows[0]) <= PAST


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_shares_of_heads_are_a_partition_and_keep_heads_together(
    ranks: int, keys_each: int, values_per_key: int, key_size: int, value_size: int
) -> None:
    key_heads = ranks * keys_each
    value_heads = key_heads * values_per_key
    channels = head_channels(key_heads, value_heads, key_size, value_size, ranks)
    names = [("q", h) for h in range(key_heads) for _ in range(key_size)]
    names += [("k", h) for h in range(key_heads) for _ in range(key_size)]
    names += [("v", h // values_per_key) for h in range(value_heads) for _ in range(value_size)]
    assert sorted(channels.flatten().tolist()) == list(range(len(names)))
    for rank in range(ranks):
        own = range(rank * keys_each, (rank + 1) * keys_each)
        found = [names[channel] for channel in channels[rank].tolist()]
        expected = [(part, h) for part in "qk" for h in own for _ in range(key_size)]
        assert found == expected + [("v", h) for h in own for _ in range(values_per_key * value_size)]


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ValueError, match="2 key and 4 value heads cannot be dealt out evenly over 4 ranks"):
        head_channels(2, 4, 8, 8, 4)


@dataclass
class Layer:
    """A GatedDeltaNet layer's inner part, as the kernels take it."""

    key_heads = 2
    value_heads = 4
    size = 8
    channels = (2 * 2 + 4) * 8

    generator: torch.Generator

    def __post_init__(self) -> None:
        draw = self.draw
        self.weights = dict(
            conv_weight=draw(self.channels, PAST + 1), conv_bias=None, A_log=draw(4) - 3, dt_bias=draw(4)
        )

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rest(self, count: int, cu_seqlens: list[int]) -> dict[str, Any]:
        """Arguments for `count` sequences that all go on from states 0, 1, ..."""
        return dict(
            slots=torch.arange(count),
            has_initial_state=torch.ones(count, dtype=torch.bool),
            cu_seqlens=torch.tensor(cu_seqlens),
            null_slot=None,
            **self.weights,
        )


@settings(deadline=None, max_examples=25)
@given(query_lens, world_sizes, st.integers(0, 2**16))
def test_two_passes_on_ranks_give_what_one_rank_gives(lens: list[int], world_size: int, seed: int) -> None:
    """The operations, the exchange of halos and the composition together; requests have earlier states."""
    lens = [rows for rows in lens if rows > 1]
    plan = plan_of(lens, world_size)
    if plan is None:
        return
    layer = Layer(torch.Generator().manual_seed(seed))
    rows, requests = sum(lens), len(lens)
    x, a, b = layer.draw(rows, layer.channels), layer.draw(rows, 4), layer.draw(rows, 4)
    conv = layer.draw(requests, layer.channels, PAST)
    state = layer.draw(requests, 4, layer.size, layer.size)

    whole_conv, whole_state = conv.clone(), state.clone()
    everything = layer.rest(requests, list(plan.query_start_loc))
    whole = gdn_prefill(x, a, b, conv_state=whole_conv, ssm_state=whole_state, **everything)

    exchange = HaloExchange.of(plan, PAST)
    sent = [x[plan.local_rows(rank)[list(exchange.send_rows[rank])]] for rank in range(world_size)]
    own_convs, own_states = [conv.clone() for _ in sent], [state.clone() for _ in sent]
    halos: dict[int, Tensor] = {}
    for rank in ranks_that_go_on(plan):
        table = torch.cat([*sent, conv[plan.segments(rank)[0].request].T])
        halos[rank] = table[exchange.halos[rank]].T
    ends = torch.full((world_size, 4, layer.size, layer.size), float("nan"))
    maps = torch.full((world_size, 4, layer.size, layer.size), float("nan"))
    for rank in range(world_size):
        if plan.sends_state(rank):
            last = plan.segments(rank)[-1]
            rows_of = slice(plan.slice_bounds(rank)[1] - last.rows, plan.slice_bounds(rank)[1])
            before = conv[last.request] if last.starts_request else halos[rank]
            n, e = gdn_prefill_segment(
                x[rows_of], a[rows_of], b[rows_of], conv_state=before[None].contiguous(), key_heads=2,
                key_size=layer.size, **layer.rest(1, [0, last.rows]),
            )  # fmt: skip
            ends[rank] = n[0] + (state[last.request] @ e[0] if last.starts_request else 0)
            maps[rank] = e[0]

    close: dict[str, Any] = dict(atol=2e-4, rtol=2e-4)
    for rank, segments in enumerate(plan.segments(rank) for rank in range(world_size)):
        if not segments:
            continue
        if rank in halos:
            own_convs[rank][segments[0].request] = halos[rank]
            own_states[rank][segments[0].request] = entering_state(plan, rank, ends, maps)
        own = slice(*plan.slice_bounds(rank))
        rest = layer.rest(len(segments), [0, *accumulate(s.rows for s in segments)])
        rest["slots"] = torch.tensor([s.request for s in segments])
        out = gdn_prefill(x[own], a[own], b[own], conv_state=own_convs[rank], ssm_state=own_states[rank], **rest)
        torch.testing.assert_close(out, whole[own], **close)
        for request in plan.finished(rank):
            torch.testing.assert_close(own_states[rank][request], whole_state[request], **close)
            torch.testing.assert_close(own_convs[rank][request], whole_conv[request])
