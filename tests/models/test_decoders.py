"""Decoders over plain parts give the logits of transformers, however a sequence's tokens come in steps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from bench_of_steps import FAMILIES, HYBRIDS, Bench, head, oracle, prompts, reference, text_config
from plain_parts import PlainParts
from torch import Tensor

from atom_patches.models.attention import Attention
from atom_patches.models.gated_delta_net import GatedDeltaNet
from atom_patches.models.latent_attention import LatentAttention

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def assert_logits(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4 * expected.abs().max().item())


def check(family: str, got: Mapping[int, Tensor], texts: list[tuple[int, ...]], ends: Mapping[int, int]) -> None:
    for sequence, logits in got.items():
        end = ends[sequence]
        assert_logits(logits, reference(family, texts[sequence])[end - len(logits) : end])


def test_ragged_prefill(family: str) -> None:
    texts = prompts(family, 7, 3, 70)
    bench = Bench(family)
    _, got = bench.run(dict(enumerate(texts)))
    check(family, got, texts, bench.done)
    recurrent = [0, 1, 2] if family in HYBRIDS else []
    assert bench.parts.recurrent == recurrent
    assert sum(isinstance(m, GatedDeltaNet) for m in bench.decoder.modules()) == len(recurrent)
    assert sum(isinstance(m, Attention | LatentAttention) for m in bench.decoder.modules()) == 4 - len(recurrent)


def test_chunked_prefill_then_decode(family: str) -> None:
    texts = prompts(family, 20, 33, 9)
    bench = Bench(family)
    for cut in ((0, 5), (5, 6), (6, 18), (18, 19), (19, 40)):
        _, got = bench.run({s: text[slice(*cut)] for s, text in enumerate(texts) if text[slice(*cut)]})
        check(family, got, texts, bench.done)


@pytest.mark.parametrize("decode", [True, False])
def test_decodes_beside_prefills(family: str, decode: bool) -> None:
    texts = prompts(family, 12, 30, 15)
    bench = Bench(family)
    bench.run({0: texts[0][:10], 1: texts[1][:3]})
    for step in ({2: texts[2][:6], 0: texts[0][10:11], 1: texts[1][3:4]}, {1: texts[1][4:30], 0: texts[0][11:12]}):
        _, got = bench.run(step, decode=decode)
        check(family, got, texts, bench.done)


def test_padding_changes_nothing(family: str) -> None:
    texts = prompts(family, 12, 8)
    bench = Bench(family)
    bench.run({0: texts[0][:11], 1: texts[1][:7]}, padding=3)
    before = bench.snapshot()
    _, got = bench.run({0: texts[0][11:], 1: texts[1][7:]}, padding=2)
    check(family, got, texts, bench.done)
    for old, new in zip(before, bench.snapshot(), strict=True):
        unowned = [0, *range(3, len(old))]
        assert torch.equal(old[unowned], new[unowned])


def test_idle_row_touches_nothing(family: str) -> None:
    texts = prompts(family, 12)
    bench = Bench(family)
    bench.run({0: texts[0][:11]})
    before = bench.snapshot()
    output, _ = bench.run({}, padding=1)
    assert output.hidden.shape == (1, text_config(family).hidden_size) and output.hidden.isfinite().all()
    assert all(torch.equal(old, new) for old, new in zip(before, bench.snapshot(), strict=True))
    _, got = bench.run({0: texts[0][11:]})
    check(family, got, texts, bench.done)


def test_embeddings_in_place_of_ids(family: str) -> None:
    texts = prompts(family, 9)
    bench = Bench(family)
    embeds = oracle(family).get_input_embeddings()(torch.tensor(texts[0])).detach()
    _, got = bench.run({0: texts[0]}, input_ids=None, input_embeds=embeds)
    check(family, got, texts, bench.done)


@pytest.mark.parametrize("adds_stream", [False, True])
def test_captured_streams(family: str, adds_stream: bool) -> None:
    texts = prompts(family, 9)
    bench = Bench(family, PlainParts(adds_stream=adds_stream))
    with torch.no_grad():
        answer = oracle(family)(torch.tensor([texts[0]]), use_cache=False, output_hidden_states=True)
    output, got = bench.run({0: texts[0]}, capture={0, 2, 3, 4})
    for layer, stream in zip((0, 2, 3), output.captured, strict=False):
        torch.testing.assert_close(stream, answer.hidden_states[layer][0], rtol=1e-4, atol=1e-3)
    assert len(output.captured) == 4
    assert torch.equal(head(family, output.hidden), got[0])
    assert_logits(got[0], answer.logits[0])
    with torch.no_grad():
        normed = bench.decoder.norm.alone(output.captured[3])
    assert_logits(head(family, normed), answer.logits[0])


def test_inputs_that_a_stage_needs(family: str) -> None:
    with pytest.raises(ValueError, match="needs token ids or embeddings"):
        Bench(family).run({0: [1]}, input_ids=None)
