"""DeepSeek-V3.2 in real SGLang engines on the overlay's sparse attention: the oracle's tokens, by our classes.

The oracle is transformers' model, with the roundings of FP8 keys and of the KV cache (sparse_oracle.py). Prompts are up
to ten times as long as what may be selected, shorter, and just as long. `sparse_probe` writes down each call of the
attention and of the indexers, in every scheduler. Each engine answers many assertions, because starting one is what
costs.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engines import Engine, Outcome, Outcomes, Wave, asked_for, engine, launch, prompt, request
from tests.sglang.environment import HERE, environment, gpus

DP2: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
#: Of the tests' checkpoints.
LAYERS, TOPK = 4, 16
OURS = "atom_patches.sglang.adapters.sparse_mla.indexer.SparseIndexer"
MODEL = "sglang.srt.models.deepseek_v2.DeepseekV32ForCausalLM"
LIKE_AMD = {"STAND_IN_LIKE_AMD": "1"}


@dataclass(frozen=True)
class Layout:
    """One engine: its checkpoint, what its KV cache rounds to, and its options.

    Attributes:
        like_amd: with pages of one token, and FP8 without scales; the CPU's stand-in alone can have them.
        costly: a difference that others cover in part: among the longest tests.
    """

    model: str = "deepseek_v32"
    cache: str = "bfloat16"
    like_amd: bool = False
    costly: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])


LAYOUTS = {
    "pages of 64": Layout(),
    "pages of 64 fp8": Layout(cache="packed", costly=True),
    "pages of 1": Layout(like_amd=True, costly=True),
    "pages of 1 fp8": Layout(cache="scaled", like_amd=True),
    "selects all": Layout("deepseek_v32_dense", options={"max_running_requests": None}),
    "dp2 fp8": Layout(cache="packed", options=DP2),
}


def _marks(one: Layout) -> list[pytest.MarkDecorator]:
    only_cpu = pytest.mark.skipif(one.like_amd and gpus() > 0, reason="SGLang gives an NVIDIA GPU pages of 64")
    return [only_cpu, pytest.mark.long] if one.costly and not gpus() else [only_cpu]


KEYS = [pytest.param(key, marks=_marks(one)) for key, one in LAYOUTS.items()]
SPARSE = [pytest.param(key, marks=_marks(one)) for key, one in LAYOUTS.items() if one.model == "deepseek_v32"]


#: Prompts by length and seed: the oracle's tokens win by more than rounding moves them, whatever the cache rounds to.
MIXED = ((1, 1), (5, 1), (37, 1), (150, 1), (2, 2), (64, 5), (90, 1), (3, 1), (TOPK - 1, 1), (TOPK, 3), (TOPK + 1, 2))
ASKED = len(MIXED) + 5


def waves(spread: bool) -> list[Wave]:
    """Many at once, some about as long as what may be selected, one alone, two that overlap, two that begin alike."""
    first, last = (0, 1) if spread else (None, None)
    many = [request(prompt(length, seed)) for length, seed in MIXED]
    alone = [request(prompt(7, 2), new=6, rank=last)]
    overlap = [request(prompt(40, 4), new=16, rank=first), request(prompt(33, 2), at=0.4, rank=last)]
    shared = [request(prompt(150) + prompt(length, seed), rank=first) for length, seed in ((4, 3), (21, 2))]
    return [many, alone, overlap, shared]


def _planned(key: str, folder: Path) -> Engine:
    one = LAYOUTS[key]
    spread = "dp_size" in one.options
    env = _armed(folder, key) | (LIKE_AMD if one.like_amd else {})
    kv = {"kv_cache_dtype": "bfloat16" if one.cache == "bfloat16" else "fp8_e4m3"}
    chunk = {"chunked_prefill_size": 256 if spread else 128}
    # SGLang's default, with which its schedulers ask how prefills are captured.
    graphs = {"cuda_graph_backend_prefill": None}
    options = {"attention_backend": "dsa", **kv, **chunk, **graphs, **one.options}
    return engine(one.model, waves(spread), env=env, cache=one.cache, **options)


def _armed(folder: Path, key: str) -> dict[str, str]:
    probe = _probe(folder, key)
    probe.mkdir(parents=True)
    return {
        "SGLANG_PLUGINS": "atom,sparse_probe",
        "ATOM_SPARSE_MLA": "1",
        "SPARSE_PROBE": str(probe),
        "PYTHONPATH": environment(HERE / "layer_probe")["PYTHONPATH"],
    }


def _probe(folder: Path, key: str) -> Path:
    return folder / "probe" / key.replace(" ", "_")


@dataclass(frozen=True)
class Probed:
    """Engines' outcomes, and by process the calls that their probes wrote down."""

    outcomes: Outcomes
    folder: Path

    def calls(self, key: str) -> list[list[dict[str, Any]]]:
        files = sorted(_probe(self.folder, key).glob("*.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Probed:
    folder = tmp_path_factory.mktemp("sparse_mla")
    wanted = asked_for(request)
    return Probed(launch(folder, {key: _planned(key, folder) for key in LAYOUTS if key in wanted}), folder)


@pytest.mark.parametrize("key", KEYS)
def test_every_answer_is_the_oracle_s(engines: Probed, key: str) -> None:
    assert engines.outcomes[key].check() == ASKED


@pytest.mark.parametrize("key", KEYS)
def test_our_classes_ran_in_all_layers(engines: Probed, key: str) -> None:
    ranks = engines.outcomes[key].ranks
    assert {rank.model for rank in ranks} == {MODEL}
    for rank in ranks:
        indexers = {name: count for name, count in rank.modules.items() if name.endswith("Indexer")}
        assert indexers == {OURS: LAYERS}
    calls = engines.calls(key)
    assert len(calls) == len(ranks)
    for one in calls:
        ran = Counter((call["what"], call["layer"]) for call in one)
        assert set(ran) == {(what, layer) for what in ("attention", "indexer") for layer in range(LAYERS)}
        assert len(set(ran.values())) == 1, f"some step skipped layers: {ran}"


@pytest.mark.parametrize("key", SPARSE)
def test_rows_select_where_there_is_more_than_they_may_see_and_only_there(engines: Probed, key: str) -> None:
    outcome = engines.outcomes[key]
    for calls in engines.calls(key):
        selected = {(call["mode"], call["selected"]) for call in calls if call["what"] == "attention"}
        assert {("EXTEND", True), ("DECODE", True)} <= selected
    if len(outcome.ranks) == 1:
        assert ("EXTEND", False) in selected, "a step of short requests alone attends to all of them"


@pytest.mark.parametrize("key", SPARSE)
def test_prompts_are_cut_and_prefixes_are_shared(engines: Probed, key: str) -> None:
    outcome = engines.outcomes[key]
    assert max(step["rows"] or 0 for rank in outcome.ranks for step in rank.steps) <= 128
    assert any(answer["cached"] >= 64 for answer in outcome.answers[-1])


@pytest.mark.parametrize("key", ["selects all"])
def test_all_is_attended_to_where_that_is_no_more_than_may_be_selected(engines: Probed, key: str) -> None:
    [calls] = engines.calls(key)
    eager = [call["selected"] for call in calls if call["mode"] == "EXTEND"]
    assert eager
    assert not any(eager)


@pytest.mark.parametrize("key", ["dp2 fp8"])
def test_a_rank_is_idle_while_the_other_selects(engines: Probed, key: str) -> None:
    zero, one = engines.outcomes[key].ranks
    assert len(zero.steps) == len(one.steps)
    together = {(a["mode"], b["mode"]) for a, b in zip(zero.steps, one.steps, strict=True)}
    assert {("IDLE", "EXTEND"), ("IDLE", "DECODE"), ("EXTEND", "IDLE"), ("DECODE", "IDLE")} <= together


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """DeepSeek-V3, which has no indexer, with all of it asked for."""
    folder = tmp_path_factory.mktemp("dense")
    asked = [[request(prompt(5), new=4), request(prompt(37), new=4)]]
    plan = engine("deepseek_v3", asked, env=_armed(folder, "dense"), attention_backend="triton")
    return launch(folder, {"dense": plan})["dense"], folder


def test_a_model_without_indexer_is_left_to_sglang(dense: tuple[Outcome, Path]) -> None:
    outcome, folder = dense
    assert outcome.check() == 2
    [rank] = outcome.ranks
    assert rank.model == "sglang.srt.models.deepseek_v2.DeepseekV3ForCausalLM"
    assert not [name for name in rank.modules if name.startswith("atom_patches")]
    assert not list(_probe(folder, "dense").glob("*.jsonl"))
