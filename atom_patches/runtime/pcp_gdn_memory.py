"""What a recurrent layer of a split step holds for its exchange, at most: what the memory profile has to leave free.

Rows and states that the kernels themselves work on are not counted: an engine of one rank has those too.
"""

from __future__ import annotations

from atom_patches.runtime.pcp_gdn_cost import FLOAT32, GdnShape

PACKED_BYTES = 64 << 20
"""Final states that travel together take no more than this, but for a single request's."""


def held_bytes(mode: str, ranks: int, tokens: int, rows: int, requests: int, shape: GdnShape) -> int:
    """The most bytes in any step.

    Args:
        mode: how the layer runs, one of `pcp_gdn_cost.MODES`.
        ranks: of the prefill-context-parallel group.
        tokens: rows of the whole step.
        rows: of one rank.
        requests: of the step.
        shape: of the layer.
    """
    if mode == "redundant":
        # The gathered slices, all rows in order, their parts by themselves, and the outputs.
        return tokens * (3 * shape.row_bytes + shape.output_bytes)
    # Packed, and the states that are packed; or received, and unpacked.
    final = 2 * max(PACKED_BYTES, shape.slot_bytes)
    if mode == "relay":
        return final
    if mode == "two_pass":
        pair = shape.value_heads * shape.key_size * (shape.value_size + shape.key_size) * FLOAT32
        # What the first pass finds and sends, all ranks', and two states while they are composed.
        return max(final, (ranks + 4) * pair + 2 * ranks * shape.tail_bytes)
    # Rows by heads, sent and received; outputs, padded and received. Then states, gathered and put in order.
    moved = rows * (3 * shape.row_bytes + 3 * shape.output_bytes)
    return moved + requests * shape.slot_bytes // ranks + 2 * final
