"""Prefill context parallelism with vLLM's own worker processes, asynchronous scheduling on and off; then none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.gdn_oracle import prompt
from tests.vllm.pcp_engines import check_greedy, engine, launch, request, single, wave
from tests.vllm.pcp_waves import GREEDY, cached_waves

TARGETS = [
    "vllm.v1.worker.block_table:BlockTable.__init__",
    "vllm.v1.worker.cp_utils:get_total_cp_world_size",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
    "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
    "vllm.v1.engine.core:resolve_kv_cache_block_sizes",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
]
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    workers = {"distributed_executor_backend": "mp"}
    two = {"prefill_context_parallel_size": 2, **workers}
    engines = {
        "asynchronous": engine("qwen3_next", GREEDY, async_scheduling=True, probe=True, **two),
        "synchronous": engine("qwen3", GREEDY, async_scheduling=False, targets=TARGETS, **two),
        "grid": engine(
            "qwen3_next",
            [*GREEDY, *cached_waves("qwen3_next")],
            probe=True,
            env={"ATOM_PCP_GDN": "two_pass", "ATOM_PCP_ATTENTION": "zigzag"},
            tensor_parallel_size=2,
            max_num_batched_tokens=96,
            block_size=32,
            **{**two, "enable_prefix_caching": True},
        ),
        "unsplit": engine("qwen3", [wave()], targets=TARGETS, distributed_executor_backend="uni"),
    }
    return single(folder, engines, VLLM_CPU_OMP_THREADS_BIND="0|1|0|1", ATOM_PCP_DEBUG="1", ATOM_PCP_GDN="relay")


@pytest.mark.parametrize(
    ("key", "model"), [("asynchronous", "qwen3_next"), ("synchronous", "qwen3"), ("grid", "qwen3_next")]
)
def test_workers_equal_the_oracle(results: Results, key: str, model: str) -> None:
    sent_waves = [*GREEDY, *cached_waves(model)] if key == "grid" else GREEDY
    for sent, got in zip(sent_waves, results[key]["waves"], strict=True):
        assert check_greedy(model, sent, got) > 0
    assert results[key]["free_after"] == results[key]["free_before"]


def test_both_workers_ran_half_of_the_first_step(results: Results) -> None:
    # Prompts of 1, 5, 37 and 150 tokens: one replicated row, 192 to spread.
    first = [worker[0]["projections"] for worker in results["asynchronous"]["rows"][0]]
    assert first == [[1 + 96], [1 + 96]]


def test_two_by_two_ranks_with_tensor_parallelism(results: Results) -> None:
    # The first step takes the prompts of 1, 5 and 37 tokens, since a chunk of the next would end inside a block.
    first = [worker[0]["projections"] for worker in results["grid"]["rows"][0]]
    assert first == [[1 + 21]] * 4
    assert sum(answer["cached"] for answer in results["grid"]["waves"][-1]) > 0


def test_an_engine_without_pcp_in_the_same_process_is_stock(results: Results) -> None:
    assert check_greedy("qwen3", wave(), results["unsplit"]["waves"][0]) > 0
    states = {name: state for name, state in results["unsplit"]["patches"].items() if name.startswith("vllm.pcp.")}
    assert set(states.values()) == {"inactive"}
    assert all(results["unsplit"]["shipped"].values())
    # The engine core of the engine before lived in this process, so its scheduler's functions were replaced.
    before = results["synchronous"]["shipped"]
    assert not before["vllm.v1.core.kv_cache_manager:KVCacheManager.__init__"]
    assert not before["vllm.v1.engine.core:resolve_kv_cache_block_sizes"]


def test_debug_traces_split_gather_and_state(results: Results, folder: Path) -> None:
    log = (folder / "log0.txt").read_text()
    assert re.search(r"split: rank 0 of 2 runs 97 rows of 193 \(1 replicated, pool rows \[0, 96\), 0 padded\)", log)
    assert re.search(r"layers\.0\.linear_attn: rank 0 relays \d+ bytes of state", log)
    assert re.search(r"layers\.3\.self_attn\.attn: rank 1 gathers 193 keys and values", log)
    assert re.search(r"layers\.0\.mlp\.experts: rank 1 gathers 194 rows for the experts", log)


@pytest.mark.parametrize(("model", "odd"), [("qwen3", "ATOM_PCP_MIN_ROWS=7"), ("qwen3_next", "ATOM_PCP_MOE=replicate")])
def test_ranks_with_different_settings_are_refused(tmp_path: Path, model: str, odd: str) -> None:
    """Before the model is loaded: with experts here and there, the first pass of a warm-up would wait for ever."""
    plan = engine(
        model,
        [[request(prompt(5, seed=1))]],
        setup="tests.vllm.odd_settings",
        env={"ODD_SETTING": odd},
        distributed_executor_backend="external_launcher",
        prefill_context_parallel_size=2,
    )
    with pytest.raises(AssertionError, match=r"ATOM_PCP_ATTENTION.*set these variables alike for all ranks") as refused:
        launch(tmp_path, 2, {"odd": plan})
    name, value = odd.split("=")
    assert re.search(rf"'{name}': '?{value}", str(refused.value))
