"""What a step's figures say, for generated batches on 2 to 8 ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.pcp_attention_split import AttentionShape
from atom_patches.runtime.pcp_figures import NONE, Dimensions, Modes, StepFigures, step_figures
from atom_patches.runtime.pcp_gdn_cost import GdnShape, two_pass_bytes

ATTENTION = AttentionShape(query_heads=16, head_size=256, element_bytes=2)
GDN = GdnShape(key_heads=16, value_heads=32, key_size=128, value_size=128)
HYBRID = Dimensions(
    hidden_row=4096, attention=ATTENTION, attention_layers=10, key_value_row=10 * 2048, gdn=GDN, gdn_layers=30,
    router_row=512, expert_layers=40,
)  # fmt: skip
DENSE = Dimensions(hidden_row=4096, attention=ATTENTION, attention_layers=36, key_value_row=36 * 2048)
GDN_MODES = ("auto", "redundant", "relay", "two_pass", "head_all_to_all")

query_lens = st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=12)
world_sizes = st.integers(2, 8)


def figures(
    lens: list[int], ranks: int, min_rows: int = 1, dimensions: Dimensions = HYBRID, **asked: str
) -> StepFigures:
    modes = Modes(
        **{"attention": "contiguous", "gdn": "relay" if dimensions.gdn else NONE, "experts": "shard", **asked}
    )
    return step_figures(lens, [0] * len(lens), ranks, min_rows, dimensions, modes)


@given(query_lens, world_sizes, st.integers(1, 64), st.sampled_from(GDN_MODES), st.sampled_from(["auto", "zigzag"]))
def test_every_row_is_counted_once(lens: list[int], ranks: int, min_rows: int, gdn: str, attention: str) -> None:
    found = figures(lens, ranks, min_rows, gdn=gdn, attention=attention)
    assert found.pooled_rows + found.replicated_rows == sum(lens)
    run = ranks * (found.rows_per_rank - found.replicated_rows)
    assert found.split == (sum(n for n in lens if n > 1) >= ranks * min_rows)
    if found.split:
        assert run == found.pooled_rows + found.padding_rows
        assert found.replicated_rows == lens.count(1)
        assert 0 <= found.padding_rows < ranks
        assert "auto" not in (found.modes.attention, found.modes.gdn)
    else:
        assert run == found.padding_rows == found.key_value_bytes == found.recurrent_bytes == 0
        assert found.modes == Modes(experts="shard")


@given(query_lens, world_sizes, st.sampled_from(GDN_MODES), st.dictionaries(st.text(), st.integers()))
def test_figures_survive_the_way_to_the_front_end(
    lens: list[int], ranks: int, gdn: str, others: dict[str, int]
) -> None:
    sent = figures(lens, ranks, gdn=gdn)
    assert StepFigures.unpacked(json.loads(json.dumps(others | sent.packed()))) == sent
    assert all(type(value) is int for value in sent.packed().values())


def test_statistics_without_figures_have_none() -> None:
    assert StepFigures.unpacked({}) is None
    assert StepFigures.unpacked({"some adapter": 1}) is None


def test_one_long_prompt_in_numbers() -> None:
    found = figures([65536], 4)
    own = 65536 // 4
    assert found.rows_per_rank == own
    assert found.key_value_bytes == 3 * own * 10 * 2048
    assert found.hidden_bytes == 3 * 4096
    # Three ranks are handed a state, and the last one broadcasts the final one to three: 6 in all, by 4 ranks.
    state = 3 * 8192 * 2 + 32 * 128 * 128 * 4
    assert found.recurrent_bytes == 6 * state * 30 // 4
    assert found.expert_bytes == 3 * own * (2 * 4096 + 512) * 40


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_states_do_not_grow_with_the_prompt_and_rows_do(ranks: int) -> None:
    for mode in ("relay", "two_pass"):
        assert figures([4096], ranks, gdn=mode).recurrent_bytes == figures([65536], ranks, gdn=mode).recurrent_bytes
    for mode in ("redundant", "head_all_to_all"):
        assert figures([4096], ranks, gdn=mode).recurrent_bytes < figures([65536], ranks, gdn=mode).recurrent_bytes
    # Besides what the passes exchange, one final state reaches the other ranks.
    final = GDN.slot_bytes * (ranks - 1) // ranks
    sent = (sum(two_pass_bytes_of(ranks)) * (ranks - 1) + final) * 30
    assert sent == figures([4096], ranks, gdn="two_pass").recurrent_bytes


def two_pass_bytes_of(ranks: int) -> tuple[int, int]:
    from atom_patches.runtime.pcp import PcpPlan

    return two_pass_bytes(PcpPlan(ranks, (4096,)), GDN)


def test_queries_move_only_where_rows_stay_contiguous() -> None:
    moved = figures([8192], 2, attention="zigzag")
    # Each rank keeps one of its two chunks' worth of queries: half of its rows go, and half come.
    assert moved.query_bytes == 2 * (8192 // 4) * ATTENTION.query_bytes * 10
    assert moved.modes.attention == "zigzag"
    assert figures([8192], 2).query_bytes == 0
    dense = figures([8192], 2, dimensions=DENSE, attention="zigzag")
    assert (dense.modes, dense.query_bytes) == (Modes("zigzag", NONE, "shard"), 0)


def test_experts_that_are_not_spread_exchange_nothing() -> None:
    assert figures([8192, 1], 2, dimensions=DENSE).expert_bytes == 0
    assert figures([1, 1], 2, dimensions=DENSE).expert_bytes == 0
    # Two decode rows that every rank runs: an all-reduce of two rows a layer, on two ranks, one of which gets logits.
    assert figures([1, 1], 2).expert_bytes == (2 * 4096 + 512) * 40
