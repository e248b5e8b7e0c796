"""The cost models against what two H200 took (benchmarks/two-gpu-h200-2026-11-30): what is chosen, and how far off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atom_patches.bench import pcp_answer, pcp_model
from atom_patches.bench.pcp_answer import Question
from atom_patches.bench.pcp_model import Estimate, Part, Unmeasured, Variant
from atom_patches.runtime.link import Link
from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_attention_split import AttentionShape, Machine, choose_layout
from atom_patches.runtime.pcp_gdn_cost import choose

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = replace(pcp_model.SHAPES["qwen3.6-35b-a3b"], attention_layers=3)
ATTENTION = AttentionShape(SHAPE.q_heads, SHAPE.attention_size, SHAPE.element_bytes)
REQUEST, BEYOND_PARTS = 6.6e-3, 1.06

LENGTHS = (16_384, 65_536, 131_072)
#: Those in which ranks share the recurrence: in `redundant`, the oracle, each runs vLLM's own scan of all rows.
MODES = ("relay", "two_pass", "head_all_to_all")
WAYS = [f"{mode} {layout}" for mode in MODES for layout in ("contiguous", "zigzag")]


def measured(file: str) -> dict[str, dict[int, float]]:
    """Seconds to the first token by mode and length; two ranks' with whole experts."""
    [found] = json.loads((BENCHMARKS / f"two-gpu-h200-2026-11-30/{file}.json").read_text())
    return {mode["mode"]: {int(n): s for n, s in mode["prefill"].items()} for mode in found["modes"]}


ONE, TWO = measured("one-2")["auto"], measured("pcp2-all-modes")


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

    def two(self, length: int, way: str) -> Estimate:
        recurrent, layout = way.split()
        chosen = Variant(layout, recurrent, "replicate", "overlay")  # type: ignore[arg-type]
        return pcp_model.estimate(SHAPE, length, 2, chosen, Link(), self.part)

    def first_token(self, length: int, way: str) -> float:
        """Beyond the devices' time, what one GPU takes for a request and in its layers, too."""
        found = self.two(length, way)
        return REQUEST + BEYOND_PARTS * (found.seconds - found.host) + found.host


@pytest.fixture(scope="module")
def predicted() -> Predicted:
    return Predicted()


def chosen(length: int) -> str:
    plan = plan_step([length], 2, min_rows=64)
    assert isinstance(plan, PcpPlan)
    gdn = replace(SHAPE.gdn, in_a_row=3)
    return f"{choose(plan, gdn)} {choose_layout('auto', plan, [0], ATTENTION, exchanged=True)}"


@pytest.mark.parametrize("length", LENGTHS)
def test_auto_takes_what_was_the_fastest(length: int) -> None:
    assert chosen(length) == min(WAYS, key=lambda way: TWO[way][length])


@pytest.mark.parametrize("length", LENGTHS)
def test_sharing_the_recurrence_is_always_faster(length: int) -> None:
    assert max(TWO[way][length] for way in WAYS) < TWO["redundant zigzag"][length]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_how_far_off(predicted: Predicted, length: int, way: str) -> None:
    off = predicted.first_token(length, way) / TWO[way][length] - 1
    assert abs(off) < (0.035 if way.startswith("relay") else 0.055), off


@pytest.mark.parametrize("length", LENGTHS)
def test_one_gpu_takes_its_parts_and_some_more(predicted: Predicted, length: int) -> None:
    assert REQUEST + BEYOND_PARTS * predicted.one(length) == pytest.approx(ONE[length], rel=0.03)


@pytest.mark.parametrize(
    ("length", "stated", "gained"), [(16_384, 1.89, 1.73), (65_536, 2.03, 1.98), (131_072, 2.01, 1.97)]
)
def test_the_speed_up_that_bench_states(predicted: Predicted, length: int, stated: float, gained: float) -> None:
    """Its own sums, without what one GPU takes besides, and what was measured for what `auto` takes."""
    way = chosen(length)
    assert ONE[length] / TWO[way][length] == pytest.approx(gained, abs=0.005)
    assert predicted.one(length) / predicted.two(length, way).seconds == pytest.approx(stated, abs=0.006)
