"""Prefill context parallelism gives exactly what transformers gives, and what an engine without it gives."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import train_recall

from tests.vllm.gdn_oracle import ROOT, oracle
from tests.vllm.pcp_engines import NEW, Engine, check_greedy, engine, launch, log_of, request, samples, single, wave
from tests.vllm.pcp_waves import (
    ALONE,
    CACHING,
    CHUNKED,
    CROWDED,
    EVERYTHING,
    GREEDY,
    SEEDED,
    SMALL,
    SMALL_PAGES,
    STAGGERED,
    STEERED,
    TINY,
    cached_waves,
)

Results = dict[str, list[dict[str, Any]]]

#: How recurrent layers run in an engine that does not say; by costs, it would depend on the number of ranks.
RELAY = {"ATOM_PCP_GDN": "relay"}

RECALL_MODEL = ROOT / "tests" / "assets" / "recall"
_random = random.Random(5)
RECALL = [train_recall.make_prompt(train_recall.STAGES[-1], _random) for _ in range(8)]

#: Queries are spread evenly whatever it costs, and the log says so.
ZIGZAG = {"ATOM_PCP_ATTENTION": "zigzag", "ATOM_PCP_DEBUG": "1"}


def layouts(size: dict[str, int], scale: int) -> dict[str, Engine]:
    """One engine for each kind of model and scheduling, in the parallel layout `size`."""
    engines = {
        "qwen3_next": engine("qwen3_next", EVERYTHING, probe=True, **size),
        "qwen3_next caching": engine("qwen3_next", cached_waves("qwen3_next"), **CACHING, **size),
        "qwen3_next zigzag": engine(
            "qwen3_next", [*GREEDY, *cached_waves("qwen3_next")], env=ZIGZAG, **CACHING, **size
        ),
        "qwen3": engine("qwen3", [wave(), STAGGERED], probe=True, **CHUNKED, **size),
        "qwen3_next two_pass": gdn("two_pass", "qwen3_next", [*GREEDY, CROWDED], **size),
        "qwen3_next chunked two_pass": gdn("two_pass", "qwen3_next", GREEDY[:2], **CHUNKED, **size),
        "qwen3_next caching two_pass": gdn("two_pass", "qwen3_next", cached_waves("qwen3_next"), **CACHING, **size),
        "qwen3_next_heads all_to_all": gdn("head_all_to_all", "qwen3_next_heads", GREEDY[:2], **CHUNKED, **size),
        "qwen3_next_heads caching all_to_all": gdn(
            "head_all_to_all", "qwen3_next_heads", cached_waves("qwen3_next_heads"), **CACHING, **size
        ),
        "qwen3 zigzag": engine("qwen3", EVERYTHING, env=ZIGZAG, **size),
    }
    if scale > 0:
        engines |= {
            "qwen3_next redundant": gdn("redundant", "qwen3_next", EVERYTHING[:2], **CHUNKED, **size),
            "qwen3_next auto": gdn("auto", "qwen3_next", EVERYTHING[:2], **CHUNKED, **size),
            "qwen3_next experts": engine("qwen3_next", [wave()], enable_expert_parallel=True, **size),
            "qwen3_5": engine("qwen3_5", [wave(), STAGGERED], **CHUNKED, **size),
            "qwen3_5 caching": engine("qwen3_5", cached_waves("qwen3_5"), **CACHING, **size),
            "qwen3_5_moe": engine("qwen3_5_moe", [wave(), STAGGERED], **size),
            "qwen3_5_moe caching": engine("qwen3_5_moe", cached_waves("qwen3_5_moe"), **CACHING, **size),
            "llama": engine("llama", EVERYTHING, **size),
            "qwen3 contiguous": engine(
                "qwen3", [wave(), STAGGERED], env={"ATOM_PCP_ATTENTION": "contiguous"}, **CHUNKED, **size
            ),
            "qwen3 crowded": engine("qwen3", [CROWDED, TINY, ALONE], **SMALL, **size),
            "qwen3_next crowded": engine("qwen3_next", [CROWDED, TINY, ALONE], **SMALL_PAGES, **size),
        }
    return engines


def gdn(mode: str, name: str, waves: list[list[dict[str, Any]]], **more: Any) -> Engine:
    """An engine whose recurrent layers run as `mode`; the launches below say `relay`."""
    return engine(name, waves, env={"ATOM_PCP_GDN": mode, "ATOM_PCP_DEBUG": "1"}, **more)


def recall_engine(**size: int) -> Engine:
    """The shipped model that answers by what stands far back in its prompt, in chunks and slices that cut it apart."""
    asked = [request(tuple(p.tokens), max_tokens=len(p.answer)) for p in RECALL]
    options = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128, skip_tokenizer_init=True)
    return {
        "model": str(RECALL_MODEL),
        "waves": [asked],
        "options": {**options, "enable_prefix_caching": False, **size},
    }


def replicating_engine(**size: int) -> Engine:
    """Every rank holds all experts, and runs its own rows through them."""
    return engine("qwen3_next", [wave(), STAGGERED], env={"ATOM_PCP_MOE": "replicate"}, probe=True, **size)


def recall_engines(**size: int) -> dict[str, Engine]:
    two_pass = recall_engine(**size)
    return {"recall": recall_engine(**size), "recall two_pass": {**two_pass, "env": {"ATOM_PCP_GDN": "two_pass"}}}


def model_of(key: str) -> str:
    return key.split()[0]


def asked_for(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> dict[str, Engine]:
    """The engines that the selected tests look at, so that one test starts no more than it needs."""
    users = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    calls = [getattr(item, "callspec", None) for item in users]
    keys = {None if call is None else call.params.get("key") for call in calls}
    return engines if None in keys else {key: plan for key, plan in engines.items() if key in keys}


@pytest.fixture(scope="module")
def unsplit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same engines with one rank and no prefill context parallelism."""
    engines = asked_for(request, layouts({}, scale=1))
    for plan in engines.values():
        plan["options"]["distributed_executor_backend"] = "uni"
    return single(tmp_path_factory.mktemp("unsplit"), engines)


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the logs of the engines on two ranks are."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folder_of_two: Path) -> Results:
    size = {"prefill_context_parallel_size": 2}
    engines = layouts(size, scale=1) | recall_engines(**size)
    engines["qwen3_next replicate"] = replicating_engine(**size)
    # These change their process for good, so they come last.
    engines["qwen3 paged"] = engine("qwen3", GREEDY, setup="tests.vllm.paged_backend", **size)
    engines["qwen3_next paged"] = engine("qwen3_next", GREEDY, setup="tests.vllm.paged_backend", env=ZIGZAG, **size)
    engines["qwen3_next biased"] = engine("qwen3_next", [wave()], setup="tests.vllm.biased_rank", **size)
    engines["qwen3_next routed"] = engine("qwen3_next", [wave()], setup="tests.vllm.biased_router", **size)
    return launch(folder_of_two, 2, asked_for(request, engines), **RELAY)


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    size = {"prefill_context_parallel_size": 3}
    engines = layouts(size, scale=0) | {"qwen3_next replicate": replicating_engine(**size)}
    return launch(tmp_path_factory.mktemp("three"), 3, asked_for(request, engines), **RELAY)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    size = {"prefill_context_parallel_size": 4}
    engines = layouts(size, scale=0) | recall_engines(**size)
    return launch(tmp_path_factory.mktemp("four"), 4, asked_for(request, engines), **RELAY)


def check_engine(key: str, plan: Engine, ranks: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """All ranks give the oracle's tokens, and what the unsplit engine gives where there is no oracle."""
    for result in ranks:
        for sent, got, expected in zip(plan["waves"], result["waves"], reference["waves"], strict=True):
            assert check_greedy(model_of(key), sent, got) > 0 or sent in (SEEDED, STEERED)
            assert samples(got) == samples(expected)
            assert [a and a["cached"] for a in got] == [a and a["cached"] for a in expected]
        assert result["free_after"] == result["free_before"], "blocks leaked"
        assert result["preemptions"] == reference["preemptions"]


KEYS = list(layouts({}, scale=1))
SOME = list(layouts({}, scale=0))
#: They do what two other engines here do; `auto`, on prompts as short as these and two ranks, is `relay`.
ALIKE = ("qwen3_next auto", "qwen3_5_moe caching")
#: Four ranks take twice as long as three, which run all of `SOME`.
ON_FOUR = ("qwen3_next", "qwen3_next_heads caching all_to_all", "qwen3 zigzag")


def often(keys: list[str], seldom: set[str]) -> list[Any]:
    """Parameters of which some are for `make test-long` only."""
    return [pytest.param(key, marks=[pytest.mark.long] * (key in seldom)) for key in keys]


@pytest.mark.parametrize("key", often(KEYS, {*ALIKE}))
def test_unsplit_engine_equals_the_oracle(unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=1)[key], [unsplit[key]], unsplit[key])


@pytest.mark.parametrize("key", often(KEYS, {*ALIKE}))
def test_two_ranks(two: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=1)[key], two[key], unsplit[key])


@pytest.mark.parametrize("key", SOME)
def test_three_ranks(three: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=0)[key], three[key], unsplit[key])


@pytest.mark.parametrize("key", often(SOME, {*SOME} - {*ON_FOUR}))
def test_four_ranks(four: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=0)[key], four[key], unsplit[key])


@pytest.mark.parametrize("key", ["qwen3 crowded", "qwen3_next crowded"])
def test_crowded_engines_do_preempt(two: Results, key: str) -> None:
    assert all(result["preemptions"] > 0 for result in two[key])


@pytest.mark.parametrize("key", ["qwen3_next caching"])
def test_prefix_caching_hits(two: Results, key: str) -> None:
    hits = [answer["cached"] for answer in two[key][0]["waves"][1]]
    assert sum(hits) > 0 and hits[0] > 0


def forward_passes(result: dict[str, Any], index: int) -> list[dict[str, list[int]]]:
    """What one rank's modules saw in each forward pass of a wave."""
    [passes] = result["rows"][index]
    return passes


#: The checkpoint's experts: how many, and how wide.
WHOLE_EXPERTS = (12, 384)

#: The first step of the first wave takes prompts of 1, 5, 37 and 150 tokens: one replicated row, 192 to spread.
FIRST_STEP = {1: 193, 2: 1 + 96, 3: 1 + 64, 4: 1 + 48}


def check_rows(ranks: list[dict[str, Any]], unsplit_result: dict[str, Any], size: int) -> None:
    """Every module of every rank runs the same, fewer rows; decodes are not spread."""
    for index in range(len(GREEDY)):
        whole = forward_passes(unsplit_result, index)
        for result in ranks:
            local = forward_passes(result, index)
            assert local == forward_passes(ranks[0], index), "ranks ran different rows"
            assert len(local) == len(whole), "another number of steps"
            for seen, before in zip(local, whole, strict=True):
                assert seen.keys() == before.keys()
                [rows] = {tuple(counts) for counts in seen.values()}
                [rows_before] = {tuple(counts) for counts in before.values()}
                assert len(rows) == len(rows_before) == 1, "modules ran different rows"
                assert rows[0] <= 4 + -(-rows_before[0] // size)
    first = forward_passes(ranks[0], 0)[0]
    assert {"projections", "attention", "embedding"} <= first.keys()
    assert all(rows == [FIRST_STEP[size]] for rows in first.values())


@pytest.mark.parametrize("key", ["qwen3_next", "qwen3"])
def test_rows_shrink_on_two_ranks(two: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    if key == "qwen3_next":
        assert "experts" in forward_passes(two[key][0], 0)[0]
        check_rows(two[key], unsplit[key], 2)
    else:
        # Chunks of 48 tokens: 1 replicated row of the first prompt, 47 to spread.
        assert forward_passes(two[key][1], 0)[0]["projections"] == [1 + 24]


@pytest.mark.parametrize("key", ["qwen3_next"])
def test_rows_shrink_on_four_ranks(four: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_rows(four[key], unsplit[key], 4)


@pytest.mark.parametrize("key", ["qwen3_next"])
def test_rows_shrink_on_three_ranks(three: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_rows(three[key], unsplit[key], 3)


def check_replicated_experts(ranks: list[dict[str, Any]], rows: int) -> None:
    """Right tokens from ranks that each hold all experts whole, and give them their own rows only."""
    for result in ranks:
        for sent, got in zip([wave(), STAGGERED], result["waves"], strict=True):
            assert check_greedy("qwen3_next", sent, got) > 0
        assert forward_passes(result, 0)[0]["experts"] == [rows]
        states = result["patches"]
        assert states["vllm.pcp.moe_parallel"] == "applied"
        assert states["vllm.pcp.moe_dispatch"] == states["vllm.pcp.moe_combine"] == "inactive"
        [layers] = result["experts"]
        assert {tuple(layer) for layer in layers} == {WHOLE_EXPERTS}


@pytest.mark.parametrize("key", ["qwen3_next replicate"])
def test_replicated_experts_on_two_ranks(two: Results, key: str) -> None:
    check_replicated_experts(two[key], FIRST_STEP[2])


@pytest.mark.parametrize("key", ["qwen3_next replicate"])
def test_replicated_experts_on_three_ranks(three: Results, key: str) -> None:
    check_replicated_experts(three[key], FIRST_STEP[3])


@pytest.mark.parametrize("key", ["qwen3_next"])
def test_experts_are_cut_over_the_ranks_by_default(two: Results, key: str) -> None:
    for result in two[key]:
        [layers] = result["experts"]
        assert {tuple(layer) for layer in layers} == {(WHOLE_EXPERTS[0], WHOLE_EXPERTS[1] // 2)}
        assert result["patches"]["vllm.pcp.moe_parallel"] == "inactive"


@pytest.mark.parametrize("key", ["qwen3_next"])
def test_memory_is_profiled_with_the_rows_of_the_worst_step(two: Results, key: str) -> None:
    for result in two[key]:
        [[seen]] = result["profile_rows"]
        # 256 tokens a step, of which at most 4 are decodes that every rank runs.
        assert seen["projections"] == [4 + 252 // 2]


@pytest.mark.parametrize("key", ["qwen3_next"])
def test_nothing_is_held_afterwards(two: Results, key: str) -> None:
    for result in two[key]:
        # The runner drops finished requests with its next step, so the last wave's may still be there.
        assert all(held <= 2 for held in result["held"])


@pytest.mark.parametrize("key", ["qwen3_next"])
def test_every_member_is_in_place(two: Results, key: str) -> None:
    paged = ("flash_attention", "flash_attention_queries", "triton_attention", "triton_attention_queries")
    others = ("moe_parallel", "deepstack", "dp_rows", "dp_naive", "dp_exchange", "ray_environment", "worker_end")
    not_here = {f"vllm.pcp.{name}" for name in (*paged, *others)}
    for result in two[key]:
        states = {name: state for name, state in result["patches"].items() if name.startswith("vllm.pcp.")}
        assert len(states) == 29
        assert {name for name, state in states.items() if state != "applied"} <= not_here


@pytest.mark.parametrize("key", ["qwen3 paged", "qwen3_next paged"])
def test_a_backend_that_writes_its_cache_apart(two: Results, key: str) -> None:
    for result in two[key]:
        for sent, got in zip(GREEDY, result["waves"], strict=True):
            assert check_greedy(model_of(key), sent, got) > 0


@pytest.mark.parametrize("key", ["qwen3_next zigzag"])
def test_queries_move_between_contiguous_rows(two: Results, folder_of_two: Path, key: str) -> None:
    """Both ranks keep contiguous rows and exchange queries."""
    for rank in range(len(two[key])):
        log = log_of(folder_of_two, two, key, rank)
        assert re.search(r"split: rank \d of 2 runs .* pool rows \[\d+, \d+\), .* attention is zigzag by exchange", log)
        assert re.search(rf"layers\.3\.self_attn\.attn: rank {rank} sends [1-9]\d* queries away", log)


@pytest.mark.parametrize("key", ["qwen3 zigzag"])
def test_rows_of_a_dense_model_are_laid_in_zigzag(two: Results, folder_of_two: Path, key: str) -> None:
    """The first step spreads 192 rows: the first rank runs the first and the last 48 of them."""
    log = log_of(folder_of_two, two, key, 0)
    assert "rank 0 of 2 runs 97 rows of 193 (1 replicated, pool rows [0, 48) and [144, 192), 0 padded)" in log


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("qwen3_next two_pass", "two_pass"),
        ("qwen3_next_heads all_to_all", "head_all_to_all"),
        ("qwen3_next redundant", "redundant"),
    ],
)
def test_recurrent_layers_run_as_asked(two: Results, folder_of_two: Path, key: str, mode: str) -> None:
    for rank in range(len(two[key])):
        log = log_of(folder_of_two, two, key, rank)
        assert f"layers.0.linear_attn: rank {rank} runs its recurrence as {mode}" in log


def check_tokens(two: Results, key: str) -> None:
    for result in two[key]:
        for asked, answer in zip(wave(), result["waves"][0], strict=True):
            [sample] = answer["samples"]
            assert sample["tokens"] == oracle("qwen3_next").answer(tuple(asked["prompt"]), NEW)[0]


@pytest.mark.parametrize("key", ["qwen3_next biased"])
def test_ranks_agree_on_sampled_ids(two: Results, key: str) -> None:
    """The second rank samples other tokens than the first, and goes on with the first one's."""
    check_tokens(two, key)


@pytest.mark.parametrize("key", ["qwen3_next routed"])
def test_ranks_agree_on_experts(two: Results, key: str) -> None:
    """The second rank would send rows that both run to other experts than the first, alone and beside a prefill."""
    check_tokens(two, key)


def check_recall(ranks: list[dict[str, Any]]) -> None:
    """Without the recurrent state or the keys of earlier rows, a quarter to a half of these answers is right."""
    for result in ranks:
        answers = [answer["samples"][0]["tokens"] for answer in result["waves"][0]]
        assert answers == [asked.answer for asked in RECALL]


@pytest.mark.parametrize("key", ["recall", "recall two_pass"])
def test_what_stands_far_back_is_not_lost_on_two_ranks(two: Results, key: str) -> None:
    check_recall(two[key])


@pytest.mark.parametrize("key", ["recall", "recall two_pass"])
def test_what_stands_far_back_is_not_lost_on_four_ranks(four: Results, key: str) -> None:
    check_recall(four[key])
