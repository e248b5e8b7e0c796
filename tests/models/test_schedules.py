"""Whatever schedule an engine chooses, the logits are those of the whole sequences."""

from __future__ import annotations

from functools import cache

import pytest
from bench_of_steps import FAMILIES, Bench, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoders import check

LENGTHS = (24, 17, 9)


@cache
def bench(family: str) -> Bench:
    """One for all examples: sequences begin anew over what earlier ones left in their slots."""
    return Bench(family)


pieces = st.sampled_from([0, 0, 1, 1, 1, 2, 5, 24])
#: Steps, each with new rows of every sequence, whether single rows decode, and padding; a last one takes what remains.
schedules = st.lists(st.tuples(st.tuples(*[pieces] * len(LENGTHS)), st.booleans(), st.integers(0, 2)), max_size=8)


@pytest.mark.parametrize("family", FAMILIES)
@given(schedule=schedules)
@settings(max_examples=12, deadline=None)
def test_any_schedule(family: str, schedule: list[tuple[tuple[int, ...], bool, int]]) -> None:
    texts = prompts(family, *LENGTHS)
    driven = bench(family)
    driven.forget()
    for rows, decode, padding in (*schedule, (LENGTHS, True, 0)):
        starts = [driven.done.get(s, 0) for s in range(len(LENGTHS))]
        new = {s: text[at : at + n] for s, (text, at, n) in enumerate(zip(texts, starts, rows, strict=True))}
        new = {s: tokens for s, tokens in new.items() if tokens}
        if new or padding:
            _, got = driven.run(new, decode=decode, padding=padding)
            check(family, got, texts, driven.done)
    assert tuple(driven.done[s] for s in range(len(LENGTHS))) == LENGTHS
