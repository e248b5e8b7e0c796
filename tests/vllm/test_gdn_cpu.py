"""Qwen3-Next and Qwen3.5, dense and MoE, on vLLM's CPU platform give exactly what transformers gives in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.gdn_oracle import Prompt, check, environment, free_port, oracle, prompt, run_engines

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NEW = 12
BLOCK = 64  # what block_size=32 becomes once a block holds a whole recurrent state

#: More prompts than requests that run at once, of one token, of several chunks, and of exactly a chunk of the rule.
MIXED = [prompt(n, seed=1) for n in (1, 5, 37, 150, 64, 129)]
LONG = prompt(150, seed=2)


def engine(name: str, rounds: list[list[Prompt]], **more: Any) -> dict[str, Any]:
    """The plan of one engine; `more` are options of LLM, or of the plan where it knows them."""
    plan = {key: more.pop(key) for key in ("prompt_logprobs", "packed_decode", "in_process", "port") if key in more}
    text_only = {"language_model_only": True} if name.startswith("qwen3_5") else {}
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256}
    return {
        "model": str(oracle(name).path),
        "rounds": rounds,
        "max_tokens": NEW,
        "options": {**options, **text_only, **more},
        **plan,
    }


def check_rounds(name: str, rounds: list[list[Prompt]], result: dict[str, Any]) -> None:
    for prompts, answers in zip(rounds, result["rounds"], strict=True):
        for tokens, answer in zip(prompts, answers, strict=True):
            check(name, tokens, answer)


GDN = {
    "batch_memcpy",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "check_and_update_config",
    "chunk_gated_delta_rule",
    "dispatch_cpu_unquantized_gemm",
    "fused_post_conv_prep",
    "fused_recurrent_packed_decode",
    "fused_sigmoid_gating_update",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "split_decodes_and_prefills",
    "update_block_size_for_backend",
}


# One process


def cached_rounds(name: str) -> list[list[Prompt]]:
    """Prompts that share a prefix; then the same again, and conversations that go on from their answers."""
    short = prompt(60, seed=3)
    first = [LONG, LONG[:140] + prompt(9, seed=4), short]
    # The answer to `short` crosses the end of its first block: that state was saved while decoding.
    grown = [old + tuple(oracle(name).answer(old, NEW)[0]) + prompt(11, seed=5) for old in (LONG, short)]
    return [first, [*first, *grown], [LONG[:130] + prompt(40, seed=6)]]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Any]]:
    """Two engines a model, all in one process: chunked prefill, and prefix caching."""
    plans = {}
    for name in HYBRIDS:
        chunked = dict(max_num_batched_tokens=48, prompt_logprobs=2, enable_prefix_caching=False)
        caching = dict(max_num_batched_tokens=96, block_size=32, enable_prefix_caching=True)
        plans[name, "chunked"] = engine(name, [MIXED], **chunked)
        plans[name, "caching"] = engine(name, cached_rounds(name), **caching)
    plans["qwen3_next", "unpacked"] = engine("qwen3_next", [MIXED], packed_decode=False)
    results = run_engines(tmp_path_factory.mktemp("single"), [list(plans.values())], [environment()])
    yield dict(zip(plans, results[0], strict=True))


@pytest.mark.parametrize("name", HYBRIDS)
def test_chunked_prefill(single: dict[tuple[str, str], Any], name: str) -> None:
    result = single[name, "chunked"]
    check_rounds(name, [MIXED], result)
    assert all(answer["prompt_logprobs"] for answer in result["rounds"][0])


@pytest.mark.parametrize("name", HYBRIDS)
def test_prefix_caching(single: dict[tuple[str, str], Any], name: str) -> None:
    result = single[name, "caching"]
    check_rounds(name, cached_rounds(name), result)
    cached = [[answer["cached"] for answer in answers] for answers in result["rounds"]]
    assert cached[1] == [2 * BLOCK, 2 * BLOCK, 0, 2 * BLOCK, BLOCK], "the second round continues from saved states"
    assert cached[2] == [2 * BLOCK]


def test_decode_from_separate_projections(single: dict[tuple[str, str], Any]) -> None:
    check_rounds("qwen3_next", [MIXED], single["qwen3_next", "unpacked"])


def test_what_is_applied_in_one_process(single: dict[tuple[str, str], Any]) -> None:
    for result in single.values():
        states = result["patches"]
        assert {name for name in GDN if states[f"vllm.cpu.{name}"] != "applied"} == set()
        for name in ("all_gatherv", "reduce_scatterv", "expert_map", "expert_map_sgl"):
            assert states[f"vllm.cpu.{name}"] == "inactive"


# Two processes

PAIR = [MIXED]


def tensor_parallel(name: str, **more: Any) -> dict[str, Any]:
    return engine(name, PAIR, tensor_parallel_size=2, port=free_port(), **more)


@pytest.fixture(scope="module")
def two_tp_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    plans = {
        "qwen3_next": tensor_parallel("qwen3_next"),
        "qwen3_5": tensor_parallel("qwen3_5", max_num_batched_tokens=48),
        "qwen3_5_moe": tensor_parallel("qwen3_5_moe", enable_expert_parallel=True),
    }
    envs = [environment(RANK=str(rank)) for rank in range(2)]
    results = run_engines(tmp_path_factory.mktemp("tp"), [list(plans.values())] * 2, envs)
    return {name: [ranks[i] for ranks in results] for i, name in enumerate(plans)}


@pytest.mark.parametrize("name", HYBRIDS)
def test_tensor_parallel(two_tp_ranks: dict[str, list[Any]], name: str) -> None:
    for result in two_tp_ranks[name]:
        check_rounds(name, PAIR, result)
        expected = "applied" if name == "qwen3_5_moe" else "inactive"
        assert result["patches"]["vllm.cpu.expert_map"] == expected


def test_worker_processes(tmp_path: Path) -> None:
    """vLLM's own processes: engine core and two workers, armed through the plugin list; experts distributed."""
    rounds = cached_rounds("qwen3_next")
    caching = dict(max_num_batched_tokens=96, block_size=32, enable_prefix_caching=True)
    plan = engine(
        "qwen3_next", rounds, tensor_parallel_size=2, enable_expert_parallel=True, in_process=False, **caching
    )
    env = environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    [[result]] = run_engines(tmp_path, [[plan]], [env])
    check_rounds("qwen3_next", rounds, result)
    assert [answer["cached"] for answer in result["rounds"][2]] == [2 * BLOCK]
    assert "Traceback" not in (tmp_path / "log0.txt").read_text(), "a worker ended with an error"


@pytest.fixture(scope="module")
def two_dp_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Data-parallel ranks with different prompts, so that they pass different numbers of rows to the experts."""
    mixed = [[MIXED[rank::2]] for rank in range(2)]
    plans = [
        [engine("qwen3_next", mixed[rank]), engine("qwen3_5_moe", mixed[rank], enable_expert_parallel=True)]
        for rank in range(2)
    ]
    port = str(free_port())
    envs = [
        environment(
            VLLM_DP_RANK=str(rank),
            VLLM_DP_RANK_LOCAL=str(rank),
            VLLM_DP_SIZE="2",
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=port,
            VLLM_CPU_OMP_THREADS_BIND="0|1",
        )
        for rank in range(2)
    ]
    results = run_engines(tmp_path_factory.mktemp("dp"), plans, envs)
    return {name: [ranks[i] for ranks in results] for i, name in enumerate(("qwen3_next", "qwen3_5_moe"))}


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_data_parallel(two_dp_ranks: dict[str, list[Any]], name: str) -> None:
    for rank, result in enumerate(two_dp_ranks[name]):
        check_rounds(name, [MIXED[rank::2]], result)
        assert result["patches"]["vllm.cpu.all_gatherv"] == "applied"
        assert result["patches"]["vllm.cpu.reduce_scatterv"] == "applied"
        assert result["patches"]["vllm.cpu.expert_map"] == ("applied" if name == "qwen3_5_moe" else "inactive")


# Refusals


def test_speculative_decoding_stops_the_launch(tmp_path: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    plan = engine("qwen3_next", [MIXED], speculative_config=speculative)
    with pytest.raises(AssertionError, match="speculative decoding .--speculative-config, method 'ngram'."):
        run_engines(tmp_path, [[plan]], [environment()])
    assert "Initializing a V1 LLM engine" not in (tmp_path / "log0.txt").read_text()
