"""The cost models against what two H200 took (benchmarks/two-gpu-h200-2026-11-30): what is chosen, and how far off."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from atom_patches.bench import pcp_answer, pcp_model
from atom_patches.bench.pcp_answer import Question
from atom_patches.bench.pcp_model import Part, Unmeasured, Variant
from atom_patches.runtime.link import Link
from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_attention_split import AttentionShape, Machine, choose_layout
from atom_patches.runtime.pcp_gdn_cost import choose

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = replace(pcp_model.SHAPES["qwen3.6-35b-a3b"], attention_layers=3)
ATTENTION = AttentionShape(SHAPE.q_heads, SHAPE.attention_size, SHAPE.element_bytes)
REQUEST, BEYOND_PARTS = 6.6e-3, 1.06

WHOLE, CUT = "pcp2 whole experts", "pcp2"
WAYS = {
    "relay zigzag": ("zigzag", "relay"),
    "two_pass zigzag": ("zigzag", "two_pass"),
    "relay contiguous": ("contiguous", "relay"),
}
LENGTHS = (16_384, 65_536, 131_072)


def measured(layout: str) -> dict[str, dict[int, float]]:
    """Seconds to the first token by mode and length."""
    name = "one" if layout == "one" else "pcp2"
    results = json.loads((BENCHMARKS / f"two-gpu-h200-2026-11-30/{name}.json").read_text())
    [found] = [result for result in results if result["layout"] == layout]
    return {mode["mode"]: {int(n): s for n, s in mode["prefill"].items()} for mode in found["modes"]}


class Predicted:
    """What `bench pcp` makes of the parts that were measured on one H200."""

    def __init__(self) -> None:
        found = json.loads((BENCHMARKS / "pcp-h200-2026-11-30/parts.json").read_text())
        question = Question(pcp_model.SHAPES["qwen3.6-35b-a3b"], LENGTHS, (2,), ("engine", "overlay"), Link())
        self._answer = pcp_answer.restored(found, question)

    def part(self, part: Part) -> float:
        """Attention at one rate, and what was measured with half of the rows counts twice."""
        if part.kind == "attention":
            pairs = sum(rows * (keys - rows) + rows * (rows + 1) // 2 for rows, keys in part.pieces)
            return pairs * ATTENTION.flops_per_pair / Machine().attention_flops
        try:
            return self._answer.seconds(part)
        except Unmeasured:
            return 2 * self._answer.seconds(part._replace(rows=part.rows // 2))

    def one(self, length: int) -> float:
        return pcp_model.estimate(SHAPE, length, 1, pcp_answer.alone("engine"), Link(), self.part).seconds

    def two(self, length: int, way: str, layout: str) -> float:
        """Beyond the devices' time, what one GPU takes for a request and in its layers, too."""
        chosen = Variant(*WAYS[way], "replicate" if layout == WHOLE else "ep", "overlay")  # type: ignore[arg-type]
        found = pcp_model.estimate(SHAPE, length, 2, chosen, Link(), self.part)
        return REQUEST + BEYOND_PARTS * (found.seconds - found.host) + found.host


@pytest.fixture(scope="module")
def predicted() -> Predicted:
    return Predicted()


def chosen(length: int, layout: str) -> str:
    plan = plan_step([length], 2, min_rows=64)
    assert isinstance(plan, PcpPlan)
    gdn = replace(SHAPE.gdn, in_a_row=3 if layout == WHOLE else 1)
    return f"{choose(plan, gdn)} {choose_layout('auto', plan, [0], ATTENTION, exchanged=True)}"


@pytest.mark.parametrize("layout", [WHOLE, CUT])
@pytest.mark.parametrize("length", LENGTHS)
def test_auto_takes_what_was_the_fastest(layout: str, length: int) -> None:
    times = {way: found[length] for way, found in measured(layout).items() if way != "auto"}
    assert set(times) == set(WAYS)
    assert chosen(length, layout) == min(times, key=times.__getitem__)


@pytest.mark.parametrize("layout", [WHOLE, CUT])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_order_of_the_modes(predicted: Predicted, layout: str, length: int) -> None:
    """But for one pair, which was 5.6 ms apart where two runs of one mode were 11.9 ms apart."""
    times = {way: measured(layout)[way][length] for way in WAYS}
    expected = {way: predicted.two(length, way, layout) for way in WAYS}
    wrong = [
        {one, other}
        for one, other in combinations(WAYS, 2)
        if (times[one] < times[other]) != (expected[one] < expected[other])
    ]
    assert wrong == ([{"relay zigzag", "two_pass zigzag"}] if (layout, length) == (WHOLE, 16_384) else [])


@pytest.mark.parametrize("layout", [WHOLE, CUT])
@pytest.mark.parametrize("length", LENGTHS)
def test_how_far_off(predicted: Predicted, layout: str, length: int) -> None:
    """`auto` took two passes where experts were cut, and a relay where they were whole, both in zigzag."""
    ran = {way: way for way in WAYS} | {"auto": "relay zigzag" if layout == WHOLE else "two_pass zigzag"}
    off = [predicted.two(length, way, layout) / measured(layout)[mode][length] - 1 for mode, way in ran.items()]
    assert max(map(abs, off)) < (0.17 if length == 16_384 else 0.06), off


@pytest.mark.parametrize("length", LENGTHS)
def test_one_gpu_takes_its_parts_and_some_more(predicted: Predicted, length: int) -> None:
    found: Any = measured("one")["auto"][length]
    assert REQUEST + BEYOND_PARTS * predicted.one(length) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("length", "stated", "gained"), [(16_384, 1.56, 1.54), (65_536, 1.98, 1.87), (131_072, 2.02, 1.95)]
)
def test_the_speed_up_that_bench_states(predicted: Predicted, length: int, stated: float, gained: float) -> None:
    """Its own sums, without what one GPU takes besides, and what was measured for the fastest mode."""
    way = chosen(length, WHOLE)
    assert measured("one")["auto"][length] / measured(WHOLE)[way][length] == pytest.approx(gained, abs=0.005)
    best = Variant(*WAYS[way], "replicate", "overlay")  # type: ignore[arg-type]
    found = predicted.one(length) / pcp_model.estimate(SHAPE, length, 2, best, Link(), predicted.part).seconds
    assert found == pytest.approx(stated, abs=0.006)
