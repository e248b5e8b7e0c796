"""Quantised checkpoints on the ATOM decoders in real vLLM engines, through vLLM's own quantised layers.

What vLLM's CPU platform runs itself (INT8, GPTQ, AWQ) is compared with vLLM's own model: every parameter bit by bit
once it is loaded, and how far the answers are from those of transformers with the same weights in float32, where inputs
are not rounded. FP8 with scales of blocks it does not run: there plain torch is put in for the kernels alone, so that
every answer must be the oracle's (plain_fp8.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.vllm.gdn_oracle import free_port, oracle
from tests.vllm.pcp_engines import Engine, Request, check_greedy, launch, single
from tests.vllm.test_atom_models import CLASSES, LAYERS, MORE, at_once, atom

OF_CLASS = {
    "deepseek_v3_groups+fp8": "AtomDeepseekV3ForCausalLM",
    "deepseek_v32+fp8": "AtomDeepseekV32ForCausalLM",
    "llama_tied+fp8": "AtomLlamaForCausalLM",
    "llama_bias+fp8": "AtomLlamaForCausalLM",
    "qwen3_tied+fp8": "AtomQwen3ForCausalLM",
    "qwen3_moe+fp8": "AtomQwen3MoeForCausalLM",
    "qwen3_next+fp8": "AtomQwen3NextForCausalLM",
    "qwen3_5+fp8": "AtomQwen3_5ForConditionalGeneration",
    "qwen3_5_moe+fp8": "AtomQwen3_5MoeForConditionalGeneration",
    "llama_tied+int8": "AtomLlamaForCausalLM",
    "qwen3_5+int8": "AtomQwen3_5ForConditionalGeneration",
    "llama_tied+gptq": "AtomLlamaForCausalLM",
    "qwen3_tied+awq": "AtomQwen3ForCausalLM",
}
BY_DEFAULT = ("qwen3_next+fp8", "qwen3_5_moe+fp8", "llama_tied+int8", "llama_tied+gptq")
KEYS = [pytest.param(key, marks=() if key in BY_DEFAULT else pytest.mark.long) for key in OF_CLASS]
EXACT = [key for key in KEYS if "fp8" in str(key.values[0])]
ROUNDED = [key for key in KEYS if key not in EXACT]
#: How much farther from the oracle than vLLM's own model, on average.
AVERAGE = 1.5


def sent(key: str) -> list[Request]:
    """All but one, of which a model has two best continuations."""
    return at_once()[key == "deepseek_v32+fp8" :]


def planned(key: str, models: str = "1") -> Engine:
    name, _, form = key.partition("+")
    more: dict[str, Any] = {"setup": "tests.vllm.plain_fp8" if form == "fp8" else "tests.vllm.loaded_weights"}
    if name in MORE:
        more = {**MORE[name], "setup": "tests.vllm.plain_fp8_latents"}
    if form in ("gptq", "awq"):
        more["dtype"] = "bfloat16"  # what vLLM's kernels take
    return atom(key, sent(key), models=models, **more)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["key"] for item in items if hasattr(item, "callspec")}
    # Those with plain kernels last, because they stay in the process; of them, attention to latents last.
    asked = sorted(asked & OF_CLASS.keys(), key=lambda key: (key.endswith("+fp8"), "deepseek" in key, key))
    plans: dict[str, Engine] = {}
    for key in asked:
        plans[key] = planned(key)
        if not key.endswith("+fp8"):
            plans[f"stock {key}"] = planned(key, models="")
    return single(tmp_path_factory.mktemp("quantised"), plans)


def distance(key: str, answers: list[Any]) -> tuple[float, int]:
    """From the oracle's log-probabilities, on average, as long as tokens are its; and how many answers are not."""
    apart: list[float] = []
    others = 0
    for asked, got in zip(at_once(), answers, strict=True):
        tokens = tuple(asked["prompt"])
        chosen, logprobs = oracle(key).answer(tokens, asked["sampling"]["max_tokens"])
        [sample] = got["samples"]
        others += sample["tokens"] != chosen
        for place, values in enumerate(sample["logprobs"]):
            if sample["tokens"][:place] != chosen[:place]:
                break
            expected = logprobs[len(tokens) - 1 + place]
            apart += [abs(value - expected[int(token)].item()) for token, value in values.items()]
    return sum(apart) / len(apart), others


@pytest.mark.parametrize("key", KEYS)
def test_our_class_ran_all_layers(engines: dict[str, Any], key: str) -> None:
    report = engines[key]["report"]
    assert report["model"] == CLASSES + OF_CLASS[key]
    assert set(report["ran"]) == {"atom_patches"} and report["layers"] == {"atom_patches": LAYERS}


@pytest.mark.parametrize("key", EXACT)
def test_every_answer_is_the_oracle_s(engines: dict[str, Any], key: str) -> None:
    assert check_greedy(key, sent(key), engines[key]["waves"][0]) == len(sent(key)) >= 7


@pytest.mark.parametrize("key", ROUNDED)
def test_every_parameter_is_loaded_as_vllm_s_own_model_loads_it(engines: dict[str, Any], key: str) -> None:
    ours, own = engines[key]["report"]["loaded"], engines[f"stock {key}"]["report"]["loaded"]
    assert engines[f"stock {key}"]["report"]["ran"].keys() == {"vllm"}
    assert ours == own
    assert any("scale" in name for name in ours)


@pytest.mark.parametrize("key", ROUNDED)
def test_answers_are_as_near_to_the_oracle_as_those_of_vllm_s_own_model(engines: dict[str, Any], key: str) -> None:
    ours, other = distance(key, engines[key]["waves"][0])
    own, their = distance(key, engines[f"stock {key}"]["waves"][0])
    print(f"{key}: {ours:.4f} from the oracle and {other} other answers, vLLM's own model {own:.4f} and {their}")
    assert ours < AVERAGE * own
    assert other <= their + 1


def test_a_quantised_shared_expert_runs_on_its_own() -> None:
    """The kernel that takes a shared expert along knows no scales."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from atom_patches.vllm.adapters.models.experts import RoutedExperts

    def taken(method: Any) -> bool:
        layer = SimpleNamespace(quant_method=method, get_parameter=lambda name: torch.zeros(4, 8))
        routed: Any = SimpleNamespace(
            own=True, experts=SimpleNamespace(intermediate_size_per_partition=8), _shared=None
        )
        shared: Any = SimpleNamespace(gate_up_proj=layer, down_proj=layer)
        return RoutedExperts.take_along(routed, shared, nn.Linear(2, 1))

    assert taken(UnquantizedLinearMethod())
    assert not taken(object())


@pytest.mark.long
def test_ranks_that_share_each_layer(tmp_path: Path) -> None:
    """Scales are cut with the weights that they belong to; experts are dealt out whole."""
    spread: dict[str, dict[str, Any]] = {
        "llama_bias+fp8": {},
        "qwen3_next+fp8": {},
        "qwen3_moe+fp8": {"enable_expert_parallel": True},
        "qwen3_5_moe+fp8": {},
    }
    plans = {
        key: atom(key, at_once(), setup="tests.vllm.plain_fp8", tensor_parallel_size=2, port=free_port(), **more)
        for key, more in spread.items()
    }
    for key, results in launch(tmp_path, 2, plans).items():
        for result in results:
            assert result["report"]["model"] == CLASSES + OF_CLASS[key]
            check_greedy(key, at_once(), result["waves"][0])


@pytest.mark.long
def test_weights_that_are_made_up(tmp_path: Path) -> None:
    """Nothing is read; every layer runs all the same."""
    plan = atom("qwen3_next+fp8", at_once()[:2], setup="tests.vllm.plain_fp8", load_format="dummy")
    [result] = single(tmp_path, {"dummy": plan}).values()
    assert set(result["report"]["ran"]) == {"atom_patches"}
