"""What the exchanges of recurrent layers hold, which the memory profile leaves free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.pcp_gdn_cost import MODES, GdnShape
from atom_patches.runtime.pcp_gdn_memory import PACKED_BYTES, held_bytes

SHAPE = GdnShape(key_heads=16, value_heads=32, key_size=128, value_size=128)

sizes = st.integers(1, 1 << 18)


@given(st.integers(2, 8), sizes, sizes, st.integers(1, 1024))
def test_rows_are_held_by_the_modes_that_exchange_rows(ranks: int, tokens: int, rows: int, requests: int) -> None:
    held = {mode: held_bytes(mode, ranks, tokens, rows, requests, SHAPE) for mode in MODES}
    longer = {mode: held_bytes(mode, ranks, 2 * tokens, 2 * rows, requests, SHAPE) for mode in MODES}
    crowded = {mode: held_bytes(mode, ranks, tokens, rows, 2 * requests, SHAPE) for mode in MODES}
    for mode in ("relay", "two_pass"):
        assert held[mode] == longer[mode] == crowded[mode]
        # A pack of states at both ends of its way, or a state and a map of every rank.
        assert held[mode] >= max(2 * PACKED_BYTES, (ranks if mode == "two_pass" else 1) * SHAPE.slot_bytes)
    assert held["redundant"] == crowded["redundant"] == longer["redundant"] // 2
    assert held["redundant"] > tokens * (SHAPE.row_bytes + SHAPE.output_bytes)
    assert longer["head_all_to_all"] - held["head_all_to_all"] > rows * (SHAPE.row_bytes + SHAPE.output_bytes)
    assert crowded["head_all_to_all"] > held["head_all_to_all"]


def test_a_state_that_is_larger_than_a_pack_travels_alone() -> None:
    large = GdnShape(key_heads=16, value_heads=4096, key_size=128, value_size=128)
    assert large.slot_bytes > PACKED_BYTES
    assert held_bytes("relay", 2, 100, 50, 1, large) == 2 * large.slot_bytes
