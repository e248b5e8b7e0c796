"""SGLang as it is, on this machine: what everything else here is measured with, and that it is stock.

Each engine gets prompts at once, of which some are longer than a chunk, then one alone, so that with data parallelism
the other rank is idle, then two that overlap on two ranks, then prompts that begin like others.
"""

from __future__ import annotations

import random

import pytest
import train_recall

from tests.sglang.engines import LATER, Engine, Outcomes, Wave, engine, launch, mixed, prompt, request
from tests.sglang.environment import ROOT

DP2 = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
RECALL = ROOT / "tests" / "assets" / "recall"
FAMILY = {
    "dense": ("qwen3_5", "sglang.srt.models.qwen3_5.Qwen3_5ForConditionalGeneration"),
    "next dp2": ("qwen3_next", "sglang.srt.models.qwen3_next.Qwen3NextForCausalLM"),
    "moe dp2 ep2": ("qwen3_5_moe", "sglang.srt.models.qwen3_5.Qwen3_5MoeForConditionalGeneration"),
}


def waves(ranks: int) -> list[Wave]:
    """Ranks are named, so that what is idle does not depend on how SGLang deals requests out."""
    first, last = (0, ranks - 1) if ranks > 1 else (None, None)
    alone = [request(prompt(7), new=6, rank=last)]
    overlap = [request(prompt(40, 2), new=24, rank=first), request(prompt(33), at=LATER, rank=last)]
    shared = [request(prompt(150) + prompt(n), rank=first) for n in (4, 21)]
    return [mixed(), alone, overlap, shared]


def recalled() -> list[train_recall.Prompt]:
    rng = random.Random(5)
    return [train_recall.make_prompt(train_recall.STAGES[-1], rng) for _ in range(6)]


def plans() -> dict[str, Engine]:
    asked = [request(one.tokens, new=len(one.answer)) for one in recalled()]
    return {
        "dense": engine("qwen3_5", waves(1), chunked_prefill_size=64),
        "recall": engine(RECALL, [asked], chunked_prefill_size=128),
        "next dp2": engine("qwen3_next", waves(2), chunked_prefill_size=128, **DP2),
        "moe dp2 ep2": engine("qwen3_5_moe", waves(2), chunked_prefill_size=128, ep_size=2, **DP2),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("stock"), plans())


@pytest.mark.parametrize("key", FAMILY)
def test_every_answer_is_the_oracle_s(outcomes: Outcomes, key: str) -> None:
    assert outcomes[key].check() == 13


@pytest.mark.parametrize("key", FAMILY)
def test_it_is_sglang_s_own_model_and_no_process_was_armed(outcomes: Outcomes, key: str) -> None:
    one = outcomes[key]
    assert {rank.model for rank in one.ranks} == {FAMILY[key][1]}
    for rank in one.ranks:
        assert not [name for name in rank.modules if name.startswith("atom_patches")]


@pytest.mark.parametrize("key", [key for key in FAMILY if "dp2" in key])
def test_a_rank_is_idle_while_the_other_works(outcomes: Outcomes, key: str) -> None:
    zero, one = outcomes[key].ranks
    assert len(zero.steps) == len(one.steps)
    together = {(a["mode"], b["mode"]) for a, b in zip(zero.steps, one.steps, strict=True)}
    assert {("IDLE", "EXTEND"), ("IDLE", "DECODE"), ("EXTEND", "IDLE"), ("DECODE", "IDLE")} <= together
    assert ("DECODE", "EXTEND") in together or ("EXTEND", "DECODE") in together
    for a, b in zip(zero.steps, one.steps, strict=True):
        assert a["ranks"] == b["ranks"], "ranks disagree about each other's rows"


def test_it_recalls_what_stands_far_back_in_a_prompt_to_the_letter(outcomes: Outcomes) -> None:
    """Its margins are far above the rounding of bfloat16; lost context shows as a wrong token."""
    assert outcomes["recall"].tokens == [[one.answer for one in recalled()]]


def test_prompts_are_cut_into_chunks_and_prefixes_are_shared(outcomes: Outcomes) -> None:
    dense = outcomes["dense"]
    longest: int = max(step["rows"] or 0 for rank in dense.ranks for step in rank.steps)
    assert longest <= 64
    assert any(answer["cached"] for answer in dense.answers[-1])
