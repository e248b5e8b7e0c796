"""The ATOM decoders of models without recurrent layers in real SGLang engines, and what is left to SGLang's own.

Checkpoints as they are published: in several files, with embedding and head in one matrix, positions beyond those of
the training, an expert's matrices apart. Each family has one engine; `long` adds layouts of ranks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from atom_patches.kernels.linear import MOST_ROWS
from tests.sglang.engines import Engine, Wave, asked_for, chat, engine
from tests.sglang.probed import DP2, IN_STAGES, SHELLS, TP2, Launched, Layout, atom, run, waves

LAYOUTS: dict[str, Layout] = {
    "llama": ("llama_tied", {}, "AtomLlamaForCausalLM", False),
    "qwen3 tp2": ("qwen3_tied", TP2, "AtomQwen3ForCausalLM", False),
    "moe": ("qwen3_moe", {}, "AtomQwen3MoeForCausalLM", False),
    "moe products tp2": ("qwen3_moe", TP2, "AtomQwen3MoeForCausalLM", False),
}
LONG: dict[str, Layout] = {
    "v3 tp2": ("deepseek_v3", TP2, "AtomDeepseekV3ForCausalLM", False),
    "v3 dp2 ep2": ("deepseek_v3", {**DP2, "ep_size": 2}, "AtomDeepseekV3ForCausalLM", True),
    "llama bias tp2": ("llama_bias", TP2, "AtomLlamaForCausalLM", False),
    "llama stages": ("llama_tied", IN_STAGES, "AtomLlamaForCausalLM", False),
    "qwen3 dp2": ("qwen3_tied", DP2, "AtomQwen3ForCausalLM", True),
    "moe dp2 ep2": ("qwen3_moe", {**DP2, "ep_size": 2}, "AtomQwen3MoeForCausalLM", True),
    "moe plain tp2": ("qwen3_moe_plain", TP2, "AtomQwen3MoeForCausalLM", False),
    "moe plain unfused": ("qwen3_moe_plain", {}, "AtomQwen3MoeForCausalLM", False),
}
#: Layers with experts, of checkpoints that have any.
SPARSE = 3
#: Their products in a step: before and behind attention, routers', and two in the layer without experts.
PRODUCTS = 4 * 2 + SPARSE + 2
#: For engines whose matrices count as measured.
OWN_PRODUCTS = {"OWN_PRODUCTS": "1"}
KEYS = [*LAYOUTS, *(pytest.param(key, marks=pytest.mark.long) for key in LONG)]
LAYERS = 4
#: Engines that are also asked the turns of a chat, by ATOM's decoder and by SGLang's own.
CHATTING = ("llama", "switched off")
#: What SGLang's own model answers, although ATOM's decoders are asked for: the checkpoint, and what is set besides.
LEFT: dict[str, tuple[str, dict[str, str]]] = {
    "not served": ("llama_linear", {}),
    "switched off": ("llama_tied", {"ATOM_PATCH_SGLANG_MODELS": "0"}),
    "none named": ("llama_tied", {"ATOM_MODELS": "0"}),
}


def asked(key: str, spread: bool) -> list[Wave]:
    return [*waves(spread), *(chat() if key in CHATTING else [])]


def planned(key: str, folder: Path) -> Engine:
    if key in LEFT:
        name, more = LEFT[key]
        plan = atom(key, folder, engine(name, asked(key, spread=False), chunked_prefill_size=128))
        return dataclasses.replace(plan, env=plan.env | more)
    name, layout, _, spread = (LAYOUTS | LONG)[key]
    plan = atom(key, folder, engine(name, asked(key, spread), chunked_prefill_size=128, **layout))
    more = {"ATOM_FUSIONS": "0", **OWN_PRODUCTS} if "unfused" in key else OWN_PRODUCTS if "products" in key else {}
    return dataclasses.replace(plan, env=plan.env | more)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launched:
    folder = tmp_path_factory.mktemp("dense_models")
    return run(folder, {key: planned(key, folder) for key in sorted(asked_for(request))})


@pytest.mark.parametrize("key", KEYS)
def test_every_answer_is_the_oracle_s(engines: Launched, key: str) -> None:
    assert engines[key].outcome.check() == 13 + 3 * (key in CHATTING)


@pytest.mark.parametrize("key", KEYS)
def test_our_class_ran_all_of_its_layers_in_every_step(engines: Launched, key: str) -> None:
    probed = engines[key]
    _, layout, shell, _ = (LAYOUTS | LONG)[key]
    assert {rank.model for rank in probed.outcome.ranks} == {SHELLS + shell}
    assert len(probed.steps) == len(probed.outcome.ranks)
    ran = [{step.get("attention", 0) for step in steps} for steps in probed.steps]
    here = LAYERS // layout.get("pp_size", 1)
    print(f"{key}: {sum(min(layers) for layers in ran)} of {here * len(ran)} layers of all ranks on ATOM code")
    assert ran == [{here}] * len(ran), "some step skipped layers"
    theirs = {name for rank in probed.outcome.ranks for name in rank.modules if name.startswith("sglang.srt.models.")}
    assert not theirs, "modules of SGLang's own models"


@pytest.mark.parametrize("key", [key for key in KEYS if "moe" in str(key) or "v3" in str(key)])
def test_experts_are_our_kernel_s_unless_that_is_switched_off(engines: Launched, key: str) -> None:
    ran = {step.get("own", 0) for steps in engines[key].steps for step in steps}
    assert ran == {0 if "unfused" in key else SPARSE}


@pytest.mark.parametrize("key", ["moe products tp2", pytest.param("moe plain unfused", marks=pytest.mark.long)])
def test_products_of_few_rows_are_ours_unless_that_is_switched_off(engines: Launched, key: str) -> None:
    """On every rank, with its part of the weights; answers are the oracle's, above."""
    steps = [step for steps in engines[key].steps for step in steps]
    few = {step.get("products", 0) for step in steps if step["rows"] <= MOST_ROWS}
    assert few == {0 if "unfused" in key else PRODUCTS}
    assert {step.get("products", 0) for step in steps if step["rows"] > MOST_ROWS} == {0}


@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.long) for key in LONG if LONG[key][3]])
def test_an_idle_rank_runs_one_row_that_is_no_request_s(engines: Launched, key: str) -> None:
    for steps in engines[key].steps:
        idle = [step for step in steps if step["logical"] == 0]
        assert idle
        assert all((step["physical"][step["rank"]], step["rows"]) == (1, 1) for step in idle)


@pytest.mark.parametrize("key", ["llama", "moe"])
def test_prompts_are_cut_and_prefixes_are_shared(engines: Launched, key: str) -> None:
    outcome = engines[key].outcome
    assert max(step["rows"] or 0 for rank in outcome.ranks for step in rank.steps) <= 128
    assert any(answer["cached"] for answer in outcome.answers[3])


@pytest.mark.parametrize("key", ["llama"])
def test_the_turns_of_a_chat_go_on_from_the_cache(engines: Launched, key: str) -> None:
    """Their tokens are the oracle's, above; those of SGLang's own decoder, too, below."""
    first, *later = (answer for (answer,) in engines[key].outcome.answers[-3:])
    assert len(later) == 2 and all(answer["cached"] >= len(first["prompt"]) for answer in later)


@pytest.mark.parametrize(
    "key", ["not served", *(pytest.param(key, marks=pytest.mark.long) for key in LEFT if key != "not served")]
)
def test_what_is_not_served_or_not_wanted_is_sglang_s_own(engines: Launched, key: str) -> None:
    probed = engines[key]
    assert probed.outcome.check() == 13 + 3 * (key in CHATTING)
    assert {rank.model for rank in probed.outcome.ranks} == {"sglang.srt.models.llama.LlamaForCausalLM"}
    assert not probed.steps, "a decoder of ATOM's ran"
    said = (engines.folder / key.replace(" ", "_") / "engine_worker.log").read_text()
    assert said.count("sglang.models is not applied") == (key == "not served")
