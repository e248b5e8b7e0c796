"""FP8 checkpoints with scales of blocks on the ATOM decoders in real SGLang engines, through SGLang's own FP8 layers.

On the stand-in for an accelerator plain torch takes the place of the kernels, and of nothing else
(cpu_site/sglang_on_cpu/fp8.py): every answer must be that of transformers with the same weights in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engines import Engine, asked_for, engine
from tests.sglang.environment import gpus
from tests.sglang.probed import DP2, SHELLS, TP2, Launched, Layout, atom, run, waves

pytestmark = pytest.mark.skipif(bool(gpus()), reason="the stand-in's kernels, which are not for a GPU")
LAYOUTS: dict[str, Layout] = {"v3": ("deepseek_v3+fp8", {}, "AtomDeepseekV3ForCausalLM", False)}
LONG: dict[str, Layout] = {
    "v3 tp2": ("deepseek_v3+fp8", TP2, "AtomDeepseekV3ForCausalLM", False),
    "llama tp2": ("llama_bias+fp8", TP2, "AtomLlamaForCausalLM", False),
    "qwen3 tied": ("qwen3_tied+fp8", {}, "AtomQwen3ForCausalLM", False),
    "moe tp2": ("qwen3_moe+fp8", TP2, "AtomQwen3MoeForCausalLM", False),
    "next tp2": ("qwen3_next+fp8", TP2, "AtomQwen3NextForCausalLM", False),
    "vision moe dp2 ep2": ("qwen3_5_moe+fp8", {**DP2, "ep_size": 2}, "AtomQwen3_5MoeForConditionalGeneration", True),
    "dense text": ("qwen3_5_text+fp8", {}, "AtomQwen3_5ForCausalLM", False),
}
KEYS = [*LAYOUTS, *(pytest.param(key, marks=pytest.mark.long) for key in LONG)]


def planned(key: str, folder: Path) -> Engine:
    name, layout, _, spread = (LAYOUTS | LONG)[key]
    return atom(key, folder, engine(name, waves(spread), chunked_prefill_size=128, **layout))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launched:
    folder = tmp_path_factory.mktemp("quantised_models")
    return run(folder, {key: planned(key, folder) for key in sorted(asked_for(request))})


@pytest.mark.parametrize("key", KEYS)
def test_every_answer_is_the_oracle_s(engines: Launched, key: str) -> None:
    assert engines[key].outcome.check() == 13


@pytest.mark.parametrize("key", KEYS)
def test_our_class_ran_with_the_engine_s_quantised_layers(engines: Launched, key: str) -> None:
    probed = engines[key]
    shell = (LAYOUTS | LONG)[key][2]
    assert {rank.model for rank in probed.outcome.ranks} == {SHELLS + shell}
    assert probed.steps and all(probed.steps)
    assert not any(step.get("own") for steps in probed.steps for step in steps), "experts without their scales"
