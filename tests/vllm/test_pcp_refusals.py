"""What prefill context parallelism does not serve is refused when the configuration is made, naming the option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.gdn_oracle import environment, run_engines

EAGER = {"enforce_eager": True}
TWO = {"prefill_context_parallel_size": 2, **EAGER}
GPU = {"device_config.device_type": "cuda"}
GRAPHS = {**GPU, "compilation_config.cudagraph_mode": "FULL_AND_PIECEWISE"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}

#: Case -> model, options beside pcp=2, and what the message must name.
REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "compilation": ("qwen3", {"enforce_eager": False}, ["--enforce-eager"]),
    "pooling": ("qwen3", {"runner": "pooling"}, ["--runner is pooling"]),
    "routed experts": ("qwen3_next", {"enable_return_routed_experts": True}, ["--enable-return-routed-experts"]),
    "pipeline": ("qwen3", {"pipeline_parallel_size": 2}, ["--pipeline-parallel-size is 2"]),
    # On the CPU platform another group has refused this by then.
    "data-parallel experts in graphs": (
        "qwen3_next",
        {"data_parallel_size": 2, "after": {"device_config.device_type": "cuda", "model_config.enforce_eager": False}},
        ["--data-parallel-size is 2", "experts", "pass --enforce-eager"],
    ),
    "data-parallel experts on a GPU": (
        "qwen3_next",
        {"data_parallel_size": 2, "after": {"device_config.device_type": "cuda"}},
        ["--data-parallel-size is 2", "CPU platform only"],
    ),
    "rows over tensor-parallel ranks": (
        "qwen3_next",
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
        ["--data-parallel-size is 2", "--tensor-parallel-size is 2", "--enable-expert-parallel"],
    ),
    "another exchange of rows": (
        "qwen3_next",
        {"data_parallel_size": 2, "after": {"parallel_config.all2all_backend": "deepep_low_latency"}},
        ["--all2all-backend is deepep_low_latency", "allgather_reducescatter"],
    ),
    "experts too narrow for the engines": (
        "qwen3_next",
        {"data_parallel_size": 5},
        ["384", "5 equal slices", "--data-parallel-size"],
    ),
    "another platform": (
        "qwen3",
        {"after": {"device_config.device_type": "xpu"}},
        ["the platform is xpu", "served are cpu, cuda"],
    ),
    "scales of the rows at hand": (
        "qwen3",
        {"after": {**GPU, "cache_config.calculate_kv_scales": True}},
        ["--calculate-kv-scales is on"],
    ),
    "collectives in graphs": (
        "qwen3",
        {"after": {**GRAPHS, "compilation_config.splitting_ops": ["vllm::unified_attention_with_output"]}},
        ["splitting_ops", "vllm::unified_kv_cache_update", "vllm::gdn_attention_core", "FULL_DECODE_ONLY"],
    ),
    "a fused cache write": (
        "qwen3",
        {"after": {**GPU, "compilation_config.pass_config.fuse_rope_kvcache": True}},
        ["pass_config.fuse_rope_kvcache is on"],
    ),
    "graphs that Inductor cuts": (
        "qwen3",
        {"after": {**GRAPHS, "compilation_config.use_inductor_graph_partition": True}},
        ["use_inductor_graph_partition is on"],
    ),
    "offload": ("qwen3", {"cpu_offload_gb": 1}, ["--cpu-offload-gb"]),
    "Ray's older executor": (
        "qwen3",
        {"after": {"parallel_config.distributed_executor_backend": "ray"}},
        ["--distributed-executor-backend is ray", "set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"],
    ),
    "data-parallel engines on Ray": (
        "qwen3",
        {"data_parallel_size": 2, "after": {"parallel_config.data_parallel_backend": "ray"}},
        ["--data-parallel-size is 2", "Ray"],
    ),
    "another executor": (
        "qwen3",
        {"after": {"parallel_config.distributed_executor_backend": "uni"}},
        ["--distributed-executor-backend is uni"],
    ),
    "speculation": ("qwen3", {"speculative_config": NGRAM}, ["--speculative-config"]),
    "lora": ("qwen3", {"enable_lora": True}, ["--enable-lora"]),
    "micro-batches": ("qwen3_next", {"after": {"parallel_config.enable_dbo": True}}, ["--enable-dbo"]),
    "two micro-batches": ("qwen3_next", {"after": {"parallel_config.ubatch_size": 2}}, ["--ubatch-size is 2"]),
    "two nodes": ("qwen3", {"after": {"parallel_config.nnodes": 2}}, ["--nnodes is 2"]),
    "quantised cache": (
        "qwen3",
        {"after": {"cache_config.cache_dtype": "int8_per_token_head"}},
        ["--kv-cache-dtype is int8_per_token_head"],
    ),
    "fp8 cache without a GPU": (
        "qwen3",
        {"after": {"cache_config.cache_dtype": "fp8"}},
        ["--kv-cache-dtype is fp8; served on cpu are auto"],
    ),
    "another fp8 cache": (
        "qwen3",
        {"after": {**GPU, "cache_config.cache_dtype": "fp8_e5m2"}},
        ["--kv-cache-dtype is fp8_e5m2; served on cuda are", "fp8_e4m3"],
    ),
    "fp8 weights without a GPU": (
        "qwen3",
        {"after": {"model_config.quantization": "fp8"}},
        ["--quantization is fp8", "not on cpu"],
    ),
    "other quantised weights": (
        "qwen3",
        {"after": {**GPU, "model_config.quantization": "awq"}},
        ["--quantization is awq", "served are unquantised checkpoints and fp8"],
    ),
    "weight transfer": ("qwen3", {"weight_transfer_config": {"backend": "nccl"}}, ["--weight-transfer-config"]),
    "another backend": ("qwen3", {"attention_backend": "FLASHINFER"}, ["--attention-backend is FLASHINFER"]),
    "connector": (
        "qwen3",
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        ["--kv-transfer-config"],
    ),
    "narrow experts": (
        "qwen3_next",
        {"prefill_context_parallel_size": 5, "env": {"ATOM_PCP_MOE": "shard"}},
        ["384", "5", "--enable-expert-parallel", "--prefill-context-parallel-size 5", "ATOM_PCP_MOE"],
    ),
    "distributed experts without the option": (
        "qwen3_next",
        {"env": {"ATOM_PCP_MOE": "ep"}},
        ["ATOM_PCP_MOE is ep", "--enable-expert-parallel"],
    ),
    "replicated and distributed experts": (
        "qwen3_next",
        {"env": {"ATOM_PCP_MOE": "replicate"}, "enable_expert_parallel": True},
        ["ATOM_PCP_MOE is replicate", "--enable-expert-parallel"],
    ),
    "several at once": (
        "qwen3",
        {"pipeline_parallel_size": 2, "enforce_eager": False},
        ["--pipeline-parallel-size is 2", "--enforce-eager"],
    ),
}
ACCEPTED = {
    "unsplit": ("qwen3", EAGER),
    "unsplit hybrid": ("qwen3_next", EAGER),
    "dense": ("qwen3", TWO),
    "heads over two ranks": ("qwen3_next", {**TWO, "env": {"ATOM_PCP_GDN": "head_all_to_all"}}),
    "no recurrent heads": ("qwen3", {**TWO, "env": {"ATOM_PCP_GDN": "head_all_to_all"}}),
    "hybrid": ("qwen3_next", TWO),
    "vision-language": ("qwen3_5", TWO),
    "its text": ("qwen3_5", {**TWO, "language_model_only": True}),
    "prompt embeddings": ("qwen3", {**TWO, "enable_prompt_embeds": True}),
    "fp8 weights and cache on a GPU": (
        "qwen3_next",
        {**TWO, "after": {**GPU, "model_config.quantization": "fp8", "cache_config.cache_dtype": "fp8_e4m3"}},
    ),
    "served backend": ("qwen3", {**TWO, "attention_backend": "CPU_ATTN"}),
    "six ranks": ("qwen3_next", {**TWO, "prefill_context_parallel_size": 6}),
    "whole experts": (
        "qwen3_next",
        {**TWO, "prefill_context_parallel_size": 5, "enable_expert_parallel": True},
    ),
    "data-parallel experts": ("qwen3_next", {**TWO, "data_parallel_size": 2}),
    "data-parallel whole experts": ("qwen3_next", {**TWO, "data_parallel_size": 2, "enable_expert_parallel": True}),
    "data-parallel, without experts": (
        "qwen3",
        {**TWO, "data_parallel_size": 2, "after": {"parallel_config.all2all_backend": "deepep_low_latency"}},
    ),
    "narrow experts on every rank": ("qwen3_next", {**TWO, "prefill_context_parallel_size": 5}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    cases = {name: {"model": model, **TWO, **options} for name, (model, options, _) in REFUSED.items()}
    cases |= {name: {"model": model, **options} for name, (model, options) in ACCEPTED.items()}
    plan = [{**options, "model": str(checkpoint(options["model"]))} for options in cases.values()]
    [results] = run_engines(tmp_path_factory.mktemp("configs"), [plan], [environment()], script="configs.py")
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    message = outcomes[case].get("refused", "")
    for part in (*REFUSED[case][2], "cannot be served"):
        assert part in message


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    assert "accepted" in outcomes[case], outcomes[case]


def test_every_rank_keeps_the_whole_cache(outcomes: dict[str, dict[str, Any]]) -> None:
    """Block sizes and the longest request's bytes do not depend on the number of ranks."""
    unsplit = outcomes["unsplit"]["accepted"]
    for case in ("dense", "hybrid"):
        for what in ("block sizes", "longest request"):
            assert outcomes[case]["accepted"][what] == unsplit[what]
    # 512 tokens of 2 heads x 32 float32 keys and as many values.
    assert outcomes["unsplit"]["accepted"]["longest request"] == 512 * 2 * 32 * 4 * 2


@pytest.mark.parametrize("case", ["hybrid", "unsplit hybrid", "vision-language", "its text"])
def test_a_hybrid_keeps_its_block_size_when_its_configuration_is_validated_again(
    outcomes: dict[str, dict[str, Any]], case: str
) -> None:
    """By it the scheduler lets prefill chunks end with a block, whose state the prefix cache then keeps."""
    assert outcomes[case]["accepted"]["after the handshake"] == 384
