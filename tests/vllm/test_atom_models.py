"""The ATOM decoders in real vLLM engines: the oracle's tokens and log-probabilities, by our classes, in all layers.

Each engine answers many assertions, because starting one is what costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import test_gdn_cpu as gdn
from tests.vllm import test_pcp_prompts as rich
from tests.vllm.gdn_oracle import Prompt, environment, free_port, oracle, prompt, run_engines
from tests.vllm.pcp_engines import (
    MIXED,
    NEW,
    PATH,
    Engine,
    Request,
    check_greedy,
    engine,
    launch,
    log_of,
    request,
    single,
)
from tests.vllm.rich_oracle import PictureOracle

CLASSES = "atom_patches.vllm.adapters.models.classes."
LAYERS = 4
BLOCK = 64  # tokens of a block that holds a whole recurrent state
LONG = prompt(150, seed=2)
#: A checkpoint and the class that vLLM is to build for it.
CLASS_OF = {
    "qwen3_next": "AtomQwen3NextForCausalLM",
    "qwen3_5": "AtomQwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "AtomQwen3_5MoeForConditionalGeneration",
    "llama_tied": "AtomLlamaForCausalLM",
    "llama_bias": "AtomLlamaForCausalLM",
    "qwen3_tied": "AtomQwen3ForCausalLM",
    "qwen3_moe": "AtomQwen3MoeForCausalLM",
    "deepseek_v3_groups": "AtomDeepseekV3ForCausalLM",
    "deepseek_v32": "AtomDeepseekV32ForCausalLM",
    "qwen3_next_demo": "AtomQwen3NextForCausalLM",
}
MODELS = [name for name in CLASS_OF if name != "qwen3_next_demo"]
#: Without the longest, for which one of the checkpoints has too few positions.
PROMPTS = [tokens for tokens in MIXED if len(tokens) < 200]
CHUNKED: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
    "block_size": 32,
}
#: vLLM's CPU platform has no attention to latents but this package's, and to selected ones none; for the indexer, its
#: own kernel turns heads of a query wrongly.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3_groups": {"env": {"ATOM_ATTENTION": "1"}},
    "deepseek_v32": {"setup": "tests.vllm.sparse_backend", "compilation_config": {"custom_ops": ["none"]}},
}
#: With a shared expert as wide as the others.
DEMO, DEMO_LAYERS = "qwen3_next_demo", 8
REQUIRED = {"ATOM_MODELS": "1", "ATOM_PATCH_VLLM_MODELS": "1"}
STOCK = {
    "not asked for": {"ATOM_MODELS": ""},
    "another family": {"ATOM_MODELS": "llama,qwen3_5"},
    "switched off": {"ATOM_MODELS": "1", "ATOM_PATCH_VLLM_MODELS": "0"},
}


def at_once() -> list[Request]:
    """More than run together."""
    return [request(tokens) for tokens in PROMPTS]


def chat(name: str) -> list[list[Request]]:
    """Three turns, each after all that was said before it."""
    turns: list[list[Request]] = []
    said: Prompt = LONG
    for seed in (5, 6, 7):
        turns.append([request(said)])
        said += tuple(oracle(name).answer(said, NEW)[0]) + prompt(11, seed=seed)
    return turns


def conversation(name: str) -> list[list[Request]]:
    """Many at once, scored in part; two that begin alike; and the first one goes on, which comes from the cache."""
    scored = [request(prompt(37, seed=1), prompt_logprobs=2), request(prompt(129, seed=1), prompt_logprobs=2)]
    return [[*at_once(), *scored], [request(LONG), request(LONG[:140] + prompt(9, seed=4))], *chat(name)]


def atom(name: str, *waves: list[Request], models: str = "1", **more: Any) -> Engine:
    given = MORE.get(name, {})
    env = {"ATOM_MODELS": models, **given.get("env", {}), **more.get("env", {})}
    options = {"distributed_executor_backend": "uni", "setup": "tests.vllm.layer_probe", **CHUNKED}
    options |= {**given, **more, "env": env}
    return engine(name, list(waves) or conversation(name), **options)


def check_ours(report: dict[str, Any], name: str, layers: int = LAYERS) -> None:
    """Our class, and nothing but our layers."""
    assert report["model"] == CLASSES + CLASS_OF[name]
    ours, ran = report["layers"].get("atom_patches", 0), report["ran"]
    print(f"{name}: {ours} of {sum(report['layers'].values())} layers on ATOM code, run {ran} times")
    assert report["layers"] == {"atom_patches": layers}
    assert set(ran) == {"atom_patches"} and ran["atom_patches"] % layers == 0 and ran["atom_patches"] > layers


# One process


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("atom_models")
    plans = {name: atom(name) for name in MODELS}
    plans["--model-impl atom"] = atom("qwen3_tied", at_once(), models="", model_impl="atom")
    for key, env in STOCK.items():
        turns = chat("qwen3_next") if key == "not asked for" else []
        plans[key] = atom("qwen3_next", at_once(), *turns, env=env)
    # Last, because it leaves vLLM's kernels without their weights.
    plans["own experts"] = atom(DEMO, at_once(), setup="tests.vllm.own_experts", max_num_batched_tokens=320)
    plans["own products"] = atom("qwen3_moe", at_once(), setup="tests.vllm.own_products", max_num_batched_tokens=320)
    return folder, single(folder, plans)


@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_the_oracle_s(engines: tuple[Path, dict[str, Any]], name: str) -> None:
    result = engines[1][name]
    checked = [check_greedy(name, sent, got) for sent, got in zip(conversation(name), result["waves"], strict=True)]
    assert checked == [10, 2, 1, 1, 1]
    for turn in result["waves"][2:]:
        assert turn[0]["cached"] >= BLOCK, "the conversation goes on from cached blocks"
    assert result["free_before"] == result["free_after"]


def test_a_chat_is_stock_s_in_every_turn(engines: tuple[Path, dict[str, Any]]) -> None:
    """Whatever the oracle says: a turn starts from what the turns before left in the cache."""
    stock, ours = engines[1]["not asked for"]["waves"][1:], engines[1]["qwen3_next"]["waves"][2:]
    assert [len(turn) for turn in stock] == [len(turn) for turn in ours] == [1, 1, 1]
    for (one,), (other,) in zip(stock, ours, strict=True):
        assert other["samples"][0]["tokens"] == one["samples"][0]["tokens"]
    assert all(turn[0]["cached"] >= BLOCK for turn in stock[1:])


@pytest.mark.parametrize("name", MODELS)
def test_our_class_ran_all_layers(engines: tuple[Path, dict[str, Any]], name: str) -> None:
    check_ours(engines[1][name]["report"], name)


def test_the_implementation_is_asked_for_by_vllm_s_own_option(engines: tuple[Path, dict[str, Any]]) -> None:
    result = engines[1]["--model-impl atom"]
    check_ours(result["report"], "qwen3_tied")
    check_greedy("qwen3_tied", at_once(), result["waves"][0])


def test_our_kernel_takes_the_shared_expert_along(engines: tuple[Path, dict[str, Any]]) -> None:
    result = engines[1]["own experts"]
    check_ours(result["report"], DEMO, DEMO_LAYERS)
    assert result["report"]["along"] == [True] * DEMO_LAYERS
    check_greedy(DEMO, at_once(), result["waves"][0])


def test_linear_layers_take_our_product_of_few_rows(engines: tuple[Path, dict[str, Any]]) -> None:
    result = engines[1]["own products"]
    check_ours(result["report"], "qwen3_moe")
    products = result["report"]["products"]
    step = LAYERS * 2 + 3 + 2
    told = "before and behind attention, the routers' of three layers, and two in the layer without experts"
    assert products["many"] % step == 0 and products["few"] % step == 0, told
    assert products["few"] > products["many"] > 0, "decode steps, and prefills"
    check_greedy("qwen3_moe", at_once(), result["waves"][0])


@pytest.mark.parametrize("key", STOCK)
def test_stock_runs_where_ours_is_not_asked_for(engines: tuple[Path, dict[str, Any]], key: str) -> None:
    result = engines[1][key]
    assert result["report"]["model"] == "vllm.model_executor.models.qwen3_next.Qwen3NextForCausalLM"
    assert set(result["report"]["ran"]) == {"vllm"}
    assert result["patches"]["vllm.models.initialize_model"] != "applied"
    check_greedy("qwen3_next", at_once(), result["waves"][0])


# Two processes


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("atom_models_of_two")
    spread: dict[str, Any] = {"enable_expert_parallel": True}
    cut: dict[str, dict[str, Any]] = {
        "qwen3_next": {"env": {"ATOM_FUSIONS": "0"}},
        "qwen3_5_moe": spread,
        "llama_bias": {},
        "qwen3_moe": {**spread, "setup": "tests.vllm.own_experts"},
        "deepseek_v3_groups": {"setup": "tests.vllm.own_experts"},
        "deepseek_v32": spread,
    }
    plans = {
        name: atom(name, at_once(), tensor_parallel_size=2, port=free_port(), **more) for name, more in cut.items()
    }
    plans["unserved"] = atom("llama_bias", at_once(), tensor_parallel_size=2, port=free_port(), cpu_offload_gb=1)
    for name in ("qwen3_moe", "deepseek_v3_groups"):  # last, because they leave vLLM's kernels without their weights
        plans[name] = plans.pop(name)
    return folder, launch(folder, 2, plans)


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5_moe", "qwen3_moe", "deepseek_v3_groups", "deepseek_v32", "llama_bias"]
)
def test_ranks_that_share_each_layer(pairs: tuple[Path, dict[str, list[Any]]], name: str) -> None:
    for result in pairs[1][name]:
        check_ours(result["report"], name)
        check_greedy(name, at_once(), result["waves"][0])


def test_what_is_not_served_runs_on_stock_and_one_line_says_why(pairs: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, results = pairs
    for rank, result in enumerate(results["unserved"]):
        assert set(result["report"]["ran"]) == {"vllm"}
        check_greedy("llama_bias", at_once(), result["waves"][0])
        lines = log_of(folder, results, "unserved", rank).splitlines()
        said = [line for line in lines if line.startswith("WARNING atom_patches") and "does not serve" in line]
        assert len(said) == 1
        assert "(--cpu-offload-gb, --offload-group-size): leave these out" in said[0]


# Wider layouts


@pytest.mark.long
def test_pipeline_stages(tmp_path: Path) -> None:
    """vLLM's own worker processes; the last stage of a tied checkpoint has a head of its own.

    Of hybrids vLLM makes no stages on the CPU, whoever's model it is: it finds no layout of their caches.
    """
    plan = gdn.engine("llama_tied", [gdn.MIXED], pipeline_parallel_size=2, in_process=False)
    env = environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1", **REQUIRED)
    [[result]] = run_engines(tmp_path, [[plan]], [env])
    gdn.check_rounds("llama_tied", [gdn.MIXED], result)


@pytest.mark.long
@pytest.mark.parametrize("spread", [False, True])
def test_data_parallel_ranks_share_experts(tmp_path: Path, spread: bool) -> None:
    """With different prompts, so that they pass different numbers of rows, and none at all while one has finished."""
    prompts = [gdn.MIXED[:4], gdn.MIXED[4:5]]
    plans = [[gdn.engine("qwen3_next", [own], enable_expert_parallel=spread)] for own in prompts]
    for own, [result] in zip(prompts, run_engines(tmp_path, plans, _data_parallel()), strict=True):
        gdn.check_rounds("qwen3_next", [own], result)
        assert result["patches"]["vllm.models.initialize_model"] == "applied"


@pytest.mark.long
def test_data_parallel_ranks_of_deepseek(tmp_path: Path) -> None:
    name, waves = "deepseek_v32", [at_once()[:4], at_once()[4:5]]
    plans = [[atom(name, own, enable_expert_parallel=True)] for own in waves]
    for own, [result] in zip(waves, run_engines(tmp_path, plans, _data_parallel(), "traffic.py"), strict=True):
        check_ours(result["report"], name)
        check_greedy(name, own, result["waves"][0])


def _data_parallel() -> list[dict[str, str]]:
    """The environments of two ranks, where ATOM's decoder is required."""
    port = str(free_port())
    return [
        environment(
            PYTHONPATH=PATH, VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE="2",
            VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=port, VLLM_CPU_OMP_THREADS_BIND="0|1", **REQUIRED,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_pictures_and_clips(tmp_path: Path, name: str) -> None:
    """Vision is vLLM's; positions count in time, height and width."""
    model = PictureOracle(name, tmp_path / "model")
    plan = rich.engine(
        name, rich.SEEN, language_model_only=False, setup=rich.SETUP, env=REQUIRED, distributed_executor_backend="uni"
    )
    result = single(tmp_path, {name: {**plan, "model": str(model.path)}})[name]
    rich.check(name, plan, result, result, lambda _: model)
    assert result["patches"]["vllm.models.initialize_model"] == "applied"
