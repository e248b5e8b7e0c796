"""The ATOM decoder of DeepSeek-V3.2 in real SGLang engines, on this package's sparse attention.

Oracle, prompts and what may be selected are those of test_sparse_mla.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engines import LATER, Engine, Wave, asked_for, engine, prompt, request
from tests.sglang.probed import DP2, SHELLS, TP2, Launched, atom, run
from tests.sglang.test_sparse_mla import ASKED, LAYERS, MIXED, waves

#: The one in FP8 has weights with scales of blocks.
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": TP2, "dp2": DP2, "fp8 tp2": TP2}
INDEXER = "atom_patches.sglang.adapters.latent_indexer.Indexer"

pytestmark = pytest.mark.long


def quantised_waves() -> list[Wave]:
    """As the others', without prompts of which the oracle with these weights has two best continuations."""
    many = [request(prompt(length, seed)) for length, seed in ((1, 2), *MIXED[1:])]
    overlap = [request(prompt(40), new=16), request(prompt(33), at=LATER)]
    shared = [request(prompt(150) + prompt(length, seed)) for length, seed in ((4, 3), (21, 1))]
    return [many, [request(prompt(7, 2), new=6)], overlap, shared]


def planned(key: str, folder: Path) -> Engine:
    options = {"attention_backend": "dsa", "kv_cache_dtype": "bfloat16", "cuda_graph_backend_prefill": None}
    chunk = {"chunked_prefill_size": 256 if key == "dp2" else 128}
    name, asked = "deepseek_v32", waves(key == "dp2")
    if "fp8" in key:
        name, asked = "deepseek_v32+fp8", quantised_waves()
    plan = engine(name, asked, {"ATOM_SPARSE_MLA": "1"}, "bfloat16", **options, **chunk, **LAYOUTS[key])
    return atom(key, folder, plan)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launched:
    folder = tmp_path_factory.mktemp("sparse_models")
    return run(folder, {key: planned(key, folder) for key in sorted(asked_for(request))})


@pytest.mark.parametrize("key", LAYOUTS)
def test_every_answer_is_the_oracle_s(engines: Launched, key: str) -> None:
    assert engines[key].outcome.check() == ASKED


@pytest.mark.parametrize("key", LAYOUTS)
def test_our_class_ran_all_of_its_layers_in_every_step(engines: Launched, key: str) -> None:
    probed = engines[key]
    assert {rank.model for rank in probed.outcome.ranks} == {f"{SHELLS}AtomDeepseekV32ForCausalLM"}
    ran = [{step.get("attention", 0) for step in steps} for steps in probed.steps]
    print(f"{key}: {sum(min(layers) for layers in ran)} of {LAYERS * len(ran)} layers of all ranks on ATOM code")
    assert ran == [{LAYERS}] * 2
    for rank in probed.outcome.ranks:
        assert rank.modules[INDEXER] == LAYERS
        assert not [name for name in rank.modules if name.startswith("sglang.srt.models.")]
