"""Layers cut over stages and weights cut over ranks give what one rank gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from bench_of_steps import FAMILIES, Bench, prompts
from plain_parts import PlainParts, Ranks
from test_decoders import check
from torch import Tensor

from atom_patches.models.decoder import Carried
from atom_patches.models.parts import Stage

STAGES = [Stage(0, 1, first=True, last=False), Stage(1, 3, first=False, last=False), Stage(3, 4, first=False)]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages(family: str) -> None:
    texts = prompts(family, 14, 9)
    stages = [Bench(family, PlainParts(part=stage)) for stage in STAGES]
    for cut in (slice(0, 6), slice(6, 7), slice(7, 14)):
        inputs: dict[str, Any] = {}
        for bench in stages:
            output, got = bench.run({s: text[cut] for s, text in enumerate(texts)}, **inputs)
            if output.residual is not None:
                inputs = {"input_ids": None, "carried": Carried(output.hidden, output.residual)}
        check(family, got, texts, stages[-1].done)
    named = [name for bench in stages for name, _ in bench.decoder.named_parameters()]
    assert sorted(named) == sorted(name for name, _ in Bench(family).decoder.named_parameters())


def test_a_later_stage_needs_what_was_left() -> None:
    with pytest.raises(ValueError, match="needs what the stage before it left"):
        Bench("qwen3_5", PlainParts(part=STAGES[1])).run({0: [1]})


@pytest.mark.parametrize(("family", "size"), [*((family, 2) for family in FAMILIES), ("qwen3_next_heads", 4)])
def test_ranks(family: str, size: int) -> None:
    """At four ranks each key head of attention is held by two of them."""
    texts = prompts(family, 14, 9)
    ranks = Ranks(size)
    results: list[dict[int, Tensor] | BaseException] = [{} for _ in range(size)]
    benches = [Bench(family, PlainParts(ranks, rank)) for rank in range(size)]

    def run(rank: int, cut: slice) -> None:
        try:
            _, results[rank] = benches[rank].run({s: text[cut] for s, text in enumerate(texts)})
        except BaseException as error:
            ranks.abort()
            results[rank] = error

    for cut in (slice(0, 6), slice(6, 7), slice(7, 14)):
        threads = [threading.Thread(target=run, args=(rank, cut)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result, bench in zip(results, benches, strict=True):
            assert isinstance(result, dict), result
            check(family, result, texts, bench.done)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_say_where_they_stand(family: str) -> None:
    places = Bench(family).parts.places
    assert [(place.index, place.layers) for place in places] == [(i, 4) for i in range(4)]
    with_experts = {"qwen3_next": [0, 1, 2, 3], "qwen3_5_moe": [0, 1, 2, 3], "qwen3_moe": [0, 2, 3],
                    "deepseek_v3": [1, 2, 3], "deepseek_v32": [1, 2, 3]}  # fmt: skip
    sparse = [layer in with_experts.get(family.removesuffix("_plain"), []) for layer in range(4)]
    assert [place.sparse for place in places] == sparse
    assert [place.previous_sparse for place in places] == [sparse[0], *sparse[:-1]]
    assert [place.next_sparse for place in places] == [*sparse[1:], sparse[3]]


def test_deepstack() -> None:
    """What a vision tower adds goes behind the first layers, as transformers does it for Qwen3-VL."""
    texts = prompts("qwen3_5", 9)
    bench = Bench("qwen3_5")
    plain, _ = bench.run({0: texts[0]}, capture={1, 2, 3})
    bench.forget()
    added = torch.randn(9, 2 * 64, generator=torch.Generator().manual_seed(1))
    shifted, _ = bench.run({0: texts[0]}, deepstack=added, capture={1, 2})
    torch.testing.assert_close(shifted.captured[0], plain.captured[0] + added[:, :64])
    assert not torch.allclose(shifted.captured[1], plain.captured[1] + added[:, 64:])  # layer 1 saw what was added
    bench.forget()
    none, _ = bench.run({0: texts[0]}, deepstack=added[:0], capture={1})
    assert torch.equal(none.captured[0], plain.captured[0])
