"""Prefill context parallelism gives exactly what transformers gives, and what an engine without it gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import train_recall

from tests.vllm.gdn_oracle import ROOT, Prompt, oracle, prompt
from tests.vllm.pcp_engines import MIXED, NEW, Engine, check_greedy, engine, launch, request, samples, single, wave

Results = dict[str, list[dict[str, Any]]]

LONG = prompt(150, seed=20)

#: Requests come while others decode, so steps mix decodes, whole prompts and chunks; two are aborted.
STAGGERED = [
    request(LONG),
    request(prompt(90, seed=30), at=2),
    request(prompt(140, seed=8), at=3, abort_at=6),
    request(prompt(1, seed=30), at=4),
    request(prompt(41, seed=10), at=5, max_tokens=1),
    request(prompt(200, seed=11), at=5, abort_at=6),
    request(prompt(23, seed=30), at=7),
]
SHORTEST = wave([prompt(n, seed=40) for n in (1, 2, 40)], max_tokens=1)
SCORED = wave([prompt(n, seed=50) for n in (33, 150, 2)], prompt_logprobs=2)
#: A batch of seeded requests only: vLLM's CPU sampler ignores seeds in a batch that has an unseeded one.
SEEDED = [
    request(prompt(60, seed=15), temperature=0.9, seed=11, n=2),
    request(prompt(9, seed=16), temperature=0.7, seed=12, top_p=0.9),
]
STEERED = [
    request(prompt(70, seed=17), repetition_penalty=1.3, presence_penalty=0.4),
    request(prompt(30, seed=18), choice=["alpha", "beta"], detokenize=True, ignore_eos=False),
]
#: The waves that have an oracle, and those that are compared with the unsplit engine alone.
GREEDY = [wave(), STAGGERED, SHORTEST, SCORED]
EVERYTHING = [*GREEDY, SEEDED, STEERED]


def cached_waves(name: str) -> list[list[dict[str, Any]]]:
    """Prompts that share a prefix; then the same again, and conversations that go on from their answers."""
    short = prompt(60, seed=3)
    first: list[Prompt] = [LONG, LONG[:140] + prompt(9, seed=4), short]
    grown = [old + tuple(oracle(name).answer(old, NEW)[0]) + prompt(11, seed=5) for old in (LONG, short)]
    return [wave(first), wave([*first, *grown]), wave([LONG[:130] + prompt(40, seed=6)])]


#: More than the blocks of a crowded engine hold at once, so its scheduler has to preempt.
CROWDED = wave([prompt(n, seed) for n, seed in ((100, 60), (120, 60), (90, 60), (110, 61))], max_tokens=40)


RECALL_MODEL = ROOT / "tests" / "assets" / "recall"
_random = random.Random(5)
RECALL = [train_recall.make_prompt(train_recall.STAGES[-1], _random) for _ in range(8)]

#: Sent after the crowd, so that the shortest prompts begin in state slots that others have left.
TINY = wave([tokens for tokens in MIXED if len(tokens) <= 5])
#: A prompt of one token by itself, so that nothing else in its step is a prefill.
ALONE = wave(MIXED[:1])


def layouts(size: dict[str, int], scale: int) -> dict[str, Engine]:
    """One engine for each kind of model and scheduling, in the parallel layout `size`."""
    chunked = dict(max_num_batched_tokens=48)
    caching = dict(max_num_batched_tokens=96, block_size=32, enable_prefix_caching=True)
    small = dict(max_model_len=192, num_gpu_blocks_override=24, block_size=16)
    small_pages = dict(max_model_len=192, num_gpu_blocks_override=16, block_size=32)
    engines = {
        "qwen3_next": engine("qwen3_next", EVERYTHING, probe=True, **size),
        "qwen3_next caching": engine("qwen3_next", cached_waves("qwen3_next"), **caching, **size),
        "qwen3": engine("qwen3", [wave(), STAGGERED], probe=True, **chunked, **size),
    }
    if scale > 0:
        engines |= {
            "qwen3_next redundant": engine(
                "qwen3_next", EVERYTHING[:2], env={"ATOM_PCP_GDN": "redundant"}, **chunked, **size
            ),
            "qwen3_next experts": engine("qwen3_next", [wave()], enable_expert_parallel=True, **size),
            "qwen3_5": engine("qwen3_5", [wave(), STAGGERED], **chunked, **size),
            "qwen3_5 caching": engine("qwen3_5", cached_waves("qwen3_5"), **caching, **size),
            "qwen3_5_moe": engine("qwen3_5_moe", [wave(), STAGGERED], **size),
            "qwen3_5_moe caching": engine("qwen3_5_moe", cached_waves("qwen3_5_moe"), **caching, **size),
            "llama": engine("llama", EVERYTHING, **size),
            "qwen3 crowded": engine("qwen3", [CROWDED, TINY, ALONE], **small, **size),
            "qwen3_next crowded": engine("qwen3_next", [CROWDED, TINY, ALONE], **small_pages, **size),
        }
    return engines


def recall_engine(**size: int) -> Engine:
    """The shipped model that answers by what stands far back in its prompt, in chunks and slices that cut it apart."""
    asked = [request(tuple(p.tokens), max_tokens=len(p.answer)) for p in RECALL]
    options = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128, skip_tokenizer_init=True)
    return {
        "model": str(RECALL_MODEL),
        "waves": [asked],
        "options": {**options, "enable_prefix_caching": False, **size},
    }


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
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    size = {"prefill_context_parallel_size": 2}
    engines = layouts(size, scale=1) | {"recall": recall_engine(**size)}
    # These two change their process for good, so they come last.
    engines["qwen3 paged"] = engine("qwen3", GREEDY, setup="tests.vllm.paged_backend", **size)
    engines["qwen3_next biased"] = engine("qwen3_next", [wave()], setup="tests.vllm.biased_rank", **size)
    return launch(tmp_path_factory.mktemp("two"), 2, asked_for(request, engines))


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    engines = layouts({"prefill_context_parallel_size": 3}, scale=0)
    return launch(tmp_path_factory.mktemp("three"), 3, asked_for(request, engines))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    size = {"prefill_context_parallel_size": 4}
    engines = layouts(size, scale=0) | {"recall": recall_engine(**size)}
    return launch(tmp_path_factory.mktemp("four"), 4, asked_for(request, engines))


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


@pytest.mark.parametrize("key", KEYS)
def test_unsplit_engine_equals_the_oracle(unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=1)[key], [unsplit[key]], unsplit[key])


@pytest.mark.parametrize("key", KEYS)
def test_two_ranks(two: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=1)[key], two[key], unsplit[key])


@pytest.mark.parametrize("key", SOME)
def test_three_ranks(three: Results, unsplit: dict[str, dict[str, Any]], key: str) -> None:
    check_engine(key, layouts({}, scale=0)[key], three[key], unsplit[key])


@pytest.mark.parametrize("key", SOME)
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
    never_imported = {"vllm.pcp.flash_attention", "vllm.pcp.triton_attention"}
    for result in two[key]:
        states = {name: state for name, state in result["patches"].items() if name.startswith("vllm.pcp.")}
        assert len(states) == 16
        assert {name for name, state in states.items() if state != "applied"} <= never_imported


@pytest.mark.parametrize("key", ["qwen3 paged"])
def test_a_backend_that_writes_its_cache_apart(two: Results, key: str) -> None:
    for result in two[key]:
        for sent, got in zip(GREEDY, result["waves"], strict=True):
            assert check_greedy("qwen3", sent, got) > 0


@pytest.mark.parametrize("key", ["qwen3_next biased"])
def test_ranks_agree_on_sampled_ids(two: Results, key: str) -> None:
    """The second rank samples other tokens than the first, and goes on with the first one's."""
    for result in two[key]:
        for asked, answer in zip(wave(), result["waves"][0], strict=True):
            [sample] = answer["samples"]
            assert sample["tokens"] == oracle("qwen3_next").answer(tuple(asked["prompt"]), NEW)[0]


def check_recall(ranks: list[dict[str, Any]]) -> None:
    """Without the recurrent state or the keys of earlier rows, a quarter to a half of these answers is right."""
    for result in ranks:
        answers = [answer["samples"][0]["tokens"] for answer in result["waves"][0]]
        assert answers == [asked.answer for asked in RECALL]


@pytest.mark.parametrize("key", ["recall"])
def test_what_stands_far_back_is_not_lost_on_two_ranks(two: Results, key: str) -> None:
    check_recall(two[key])


@pytest.mark.parametrize("key", ["recall"])
def test_what_stands_far_back_is_not_lost_on_four_ranks(four: Results, key: str) -> None:
    check_recall(four[key])
