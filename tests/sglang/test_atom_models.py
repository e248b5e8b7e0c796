"""The ATOM decoders in real SGLang engines: the oracle's tokens, in every layout, by our classes, in all layers.

`layer_probe` writes down each step of a decoder, in every scheduler: what this shows of idle ranks are the rows that
really ran. Each engine answers many assertions, because starting one is what costs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engines import Engine, asked_for, engine, mixed, request
from tests.sglang.environment import gpus
from tests.sglang.probed import DP2, IN_STAGES, SHELLS, TP2, Launched, Layout, atom, run, waves
from tests.sglang.test_stock import RECALL, recalled

LAYOUTS: dict[str, Layout] = {}
if gpus():
    # One rank alone, with graphs also where the ranks below share a GPU.
    LAYOUTS["next"] = ("qwen3_next", {}, "AtomQwen3NextForCausalLM", False)
    LAYOUTS["moe"] = ("qwen3_5_moe", {}, "AtomQwen3_5MoeForConditionalGeneration", False)
LAYOUTS |= {
    # SGLang makes its prefix cache fit overlapping steps for architectures that it lists, and this is none of them.
    "dense": ("qwen3_5_text", {**IN_STAGES, "disable_overlap_schedule": True}, "AtomQwen3_5ForCausalLM", False),
    "vision stages": ("qwen3_5", IN_STAGES, "AtomQwen3_5ForConditionalGeneration", False),
    "next tp2": ("qwen3_next", TP2, "AtomQwen3NextForCausalLM", False),
    "vision dp2": ("qwen3_5", DP2, "AtomQwen3_5ForConditionalGeneration", True),
    "moe dp2 ep2": ("qwen3_5_moe", {**DP2, "ep_size": 2}, "AtomQwen3_5MoeForConditionalGeneration", True),
}
#: Recurrent and attention layers of the tests' checkpoints, whole and in two pipeline stages.
WHOLE, STAGES = [(3, 1)], [(2, 0), (1, 1)]
SPREAD = [key for key, (_, _, _, spread) in LAYOUTS.items() if spread]


def planned(key: str, folder: Path) -> Engine:
    if key == "recall":
        asked = [request(one.tokens, new=len(one.answer)) for one in recalled()]
        return atom(key, folder, engine(RECALL, [asked], chunked_prefill_size=128))
    if key == "demo":
        return atom(key, folder, engine("qwen3_next_demo", [mixed()], chunked_prefill_size=128))
    if key == "dp4":
        ranks = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
        return atom(key, folder, engine("qwen3_next", waves(True), chunked_prefill_size=128, **ranks))
    name, layout, _, spread = LAYOUTS[key]
    return atom(key, folder, engine(name, waves(spread), chunked_prefill_size=128, **layout))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launched:
    folder = tmp_path_factory.mktemp("atom_models")
    plans = {key: planned(key, folder) for key in sorted(asked_for(request))}
    return run(folder, plans)


@pytest.mark.parametrize("key", LAYOUTS)
def test_every_answer_is_the_oracle_s(engines: Launched, key: str) -> None:
    assert engines[key].outcome.check() == 13


@pytest.mark.parametrize("key", LAYOUTS)
def test_our_class_ran_all_of_its_layers_in_every_step(engines: Launched, key: str) -> None:
    probed = engines[key]
    assert {rank.model for rank in probed.outcome.ranks} == {SHELLS + LAYOUTS[key][2]}
    assert len(probed.steps) == len(probed.outcome.ranks)
    ran = [{(step.get("recurrent", 0), step.get("attention", 0)) for step in steps} for steps in probed.steps]
    assert all(len(layers) == 1 for layers in ran), "some step skipped layers"
    whole = WHOLE * len(ran)
    assert sorted(layers.pop() for layers in ran) == sorted(STAGES if "pp_size" in LAYOUTS[key][1] else whole)


@pytest.mark.parametrize("key", SPREAD)
def test_an_idle_rank_runs_one_row_that_is_no_request_s(engines: Launched, key: str) -> None:
    for steps in engines[key].steps:
        idle = [step for step in steps if step["logical"] == 0]
        assert idle
        for step in idle:
            assert step["physical"][step["rank"]] == 1
            assert (step["rows"], step["sequences"]) == (1, 0)


@pytest.mark.parametrize("key", SPREAD)
def test_ranks_plan_every_step_alike(engines: Launched, key: str) -> None:
    """Equal lengths, since each rank enters a decoder whenever the other does."""
    zero, one = engines[key].steps
    assert len(zero) == len(one)
    for a, b in zip(zero, one, strict=True):
        assert a["physical"] == b["physical"]
        assert a["uniform_decode"] == b["uniform_decode"]
        busy = {step["mode"] for step in (a, b)} - {"idle"}
        assert a["uniform_decode"] == (busy == {"decode"})


@pytest.mark.parametrize("key", SPREAD)
def test_modes_meet_that_deadlocked_decoders_before(engines: Launched, key: str) -> None:
    zero, one = engines[key].steps
    met = {frozenset((a["mode"], b["mode"])) for a, b in zip(zero, one, strict=True)}
    assert {frozenset(("idle", "extend")), frozenset(("idle", "decode")), frozenset(("extend", "decode"))} <= met


@pytest.mark.parametrize("key", ["next tp2"])
def test_prompts_are_cut_and_prefixes_are_shared(engines: Launched, key: str) -> None:
    outcome = engines[key].outcome
    assert max(step["rows"] or 0 for rank in outcome.ranks for step in rank.steps) <= 128
    assert any(answer["cached"] for answer in outcome.answers[-1])


@pytest.mark.long
@pytest.mark.parametrize("key", ["demo"])
def test_the_shared_expert_is_taken_along(engines: Launched, key: str) -> None:
    """Its width is a multiple of the experts', as in published checkpoints."""
    probed = engines[key]
    assert probed.outcome.check() == 8
    assert {(step.get("own"), step.get("along")) for steps in probed.steps for step in steps} == {(8, 8)}


@pytest.mark.long
@pytest.mark.skipif(bool(gpus()), reason="four ranks of the stand-in")
@pytest.mark.parametrize("key", ["dp4"])
def test_some_extend_and_some_decode_while_others_have_nothing(engines: Launched, key: str) -> None:
    """All of it in one step, of more ranks than two."""
    probed = engines[key]
    assert probed.outcome.check() == 13
    assert {rank.model for rank in probed.outcome.ranks} == {f"{SHELLS}AtomQwen3NextForCausalLM"}
    met = zip(*(rank.steps for rank in probed.outcome.ranks), strict=True)
    assert any({"EXTEND", "DECODE", "IDLE"} <= {step["mode"] for step in steps} for steps in met)


@pytest.mark.skipif(not gpus(), reason="in float32 every token above is compared")
@pytest.mark.parametrize("key", ["recall"])
def test_it_recalls_what_stands_far_back_in_a_prompt_to_the_letter(engines: Launched, key: str) -> None:
    """Its margins are far above the rounding of bfloat16; lost context shows as a wrong token."""
    assert engines[key].outcome.tokens == [[one.answer for one in recalled()]]
