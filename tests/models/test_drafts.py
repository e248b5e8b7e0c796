"""Drafted tokens: outputs as if they were accepted, live states as if nothing had happened, and a state for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_of_steps import HYBRIDS, Bench, prompts
from test_decoders import check

from atom_patches.runtime.gdn import GdnBinding

DRAFTED = 3


def bench_before_drafts(family: str, texts: list[tuple[int, ...]], kept: int = DRAFTED) -> Bench:
    bench = Bench(family, drafted=kept)
    bench.run({s: text[:-DRAFTED] for s, text in enumerate(texts)})
    return bench


@pytest.mark.parametrize("kept", [DRAFTED, DRAFTED + 2])
@pytest.mark.parametrize("family", HYBRIDS)
def test_verification(family: str, kept: int) -> None:
    texts = prompts(family, 13, 8)
    bench = bench_before_drafts(family, texts, kept)
    before = bench.snapshot()
    _, got = bench.run({s: text[-DRAFTED:] for s, text in enumerate(texts)}, drafted=DRAFTED)
    check(family, got, texts, {s: len(text) for s, text in enumerate(texts)})
    assert all(torch.equal(old, new) for old, new in zip(before, bench.snapshot(), strict=True))


@pytest.mark.parametrize("family", HYBRIDS)
def test_each_token_leaves_its_state(family: str) -> None:
    texts = prompts(family, 13, 8)
    bench, other = bench_before_drafts(family, texts), bench_before_drafts(family, texts)
    bench.run({s: text[-DRAFTED:] for s, text in enumerate(texts)}, drafted=DRAFTED)
    for token in range(DRAFTED):
        other.run({s: text[len(text) - DRAFTED + token :][:1] for s, text in enumerate(texts)})
        for layer, states in other.layers.items():
            drafts = bench.layers[layer]
            assert drafts.draft_conv is not None and drafts.draft_temporal is not None
            for sequence, row in ((0, 1), (1, 0)):  # as `Bench.bind` deals them out
                torch.testing.assert_close(
                    drafts.draft_temporal[row, token], states.temporal[sequence + 1], rtol=1e-3, atol=1e-4
                )
                torch.testing.assert_close(
                    drafts.draft_conv[row, token], states.conv[sequence + 1], rtol=1e-3, atol=1e-4
                )


def test_windows_may_overlap() -> None:
    """An engine may keep each sequence's inputs once, and see a window at every token."""
    texts = prompts("qwen3_5", 13, 8)
    plain, dense = bench_before_drafts("qwen3_5", texts), bench_before_drafts("qwen3_5", texts)
    for layer, states in dense.layers.items():
        conv = states.draft_conv
        assert conv is not None
        rows, drafted, channels, past = conv.shape
        inputs = torch.zeros(rows, channels, past - 1 + drafted)
        object.__setattr__(dense.layers[layer], "draft_conv", inputs.unfold(2, past, 1).transpose(1, 2))
    for bench in (plain, dense):
        bench.run({s: text[-DRAFTED:] for s, text in enumerate(texts)}, drafted=DRAFTED)
    for layer, states in plain.layers.items():
        expected, got = states.draft_conv, dense.layers[layer].draft_conv
        assert expected is not None and got is not None
        assert torch.equal(got[:2], expected[:2])


def test_padding_among_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in a slot for "none" gives zeros, and leaves live states alone."""
    texts = prompts("qwen3_5", 13, 8)
    bench = bench_before_drafts("qwen3_5", texts)
    before = bench.snapshot()
    drafts = [states.draft_temporal.clone() for states in bench.layers.values() if states.draft_temporal is not None]
    bind = bench.bind

    def bind_second_as_padding(*arguments: Any) -> GdnBinding:
        binding = bind(*arguments)
        binding.slots[1] = -1
        return binding

    monkeypatch.setattr(bench, "bind", bind_second_as_padding)
    _, got = bench.run({s: text[-DRAFTED:] for s, text in enumerate(texts)}, drafted=DRAFTED)
    del got[1]
    check("qwen3_5", got, texts, {0: len(texts[0])})
    for old, states in zip(drafts, bench.layers.values(), strict=True):
        assert states.draft_temporal is not None
        assert torch.equal(states.draft_temporal[0, :-1], old[0, :-1])  # the second's, as `Bench.bind` deals them out
    assert all(torch.equal(old, new) for old, new in zip(before, bench.snapshot(), strict=True))


@pytest.mark.parametrize(("kept", "message"), [(0, "keeps no states"), (2, "keeps states for 2")])
def test_no_place_for_drafts(kept: int, message: str) -> None:
    texts = prompts("qwen3_5", 13)
    bench = bench_before_drafts("qwen3_5", texts, kept)
    with pytest.raises(ValueError, match=message):
        bench.run({0: texts[0][-DRAFTED:]}, drafted=DRAFTED)
