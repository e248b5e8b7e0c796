"""When the ATOM decoders run in SGLang, and what they refuse by the name of the option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.core import PatchError
from atom_patches.sglang.models._config import atom_models_asked

STOCK: dict[str, Any] = {
    "attn_cp_size": 1, "dcp_size": 1, "moe_dp_size": 1, "dwdp_size": 1, "moe_dense_tp_size": None,
    "tp_size": 4, "dp_size": 2,
    "enable_two_batch_overlap": False, "enable_single_batch_overlap": False, "enable_pdmux": False,
    "elastic_ep_backend": None, "enable_eplb": False, "ep_num_redundant_experts": 0, "moe_a2a_backend": "none",
    "quantization": None, "torchao_config": "", "enable_lora": False, "encoder_only": False, "language_only": False,
    "enable_linear_replayssm": False, "enable_linear_replayssm_spec": False, "enable_unified_memory": False,
    "enable_page_major_kv_layout": False, "speculative_algorithm": None, "speculative_eagle_topk": None,
    "enable_torch_compile": False, "device": "cuda",
}  # fmt: skip


def server(architecture: str = "Qwen3NextForCausalLM", prefill: str = "disabled", **more: Any) -> Any:
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=prefill))
    return SimpleNamespace(get_model_config=lambda: model, cuda_graph_config=graphs, **{**STOCK, **more})


@pytest.fixture(autouse=True)
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_MODELS", "1")


@pytest.mark.parametrize(
    ("asked", "architecture", "served"),
    [
        ("", "Qwen3NextForCausalLM", False),
        ("0", "Qwen3NextForCausalLM", False),
        ("1", "Qwen3NextForCausalLM", True),
        ("1", "LlamaForCausalLM", False),
        ("qwen3_5", "Qwen3NextForCausalLM", False),
        ("qwen3_5", "Qwen3_5MoeForConditionalGeneration", True),
        ("qwen3_5,qwen3_next", "Qwen3NextForCausalLM", True),
    ],
)
def test_a_family_is_served_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, architecture: str, served: bool
) -> None:
    monkeypatch.setenv("ATOM_MODELS", asked)
    assert atom_models_asked(server(architecture)).ok is served


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"attn_cp_size": 2}, "--attn-cp-size 2"),
        ({"moe_dense_tp_size": 1}, "--moe-dense-tp-size 1"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"moe_a2a_backend": "pplx"}, "--moe-a2a-backend pplx"),
        ({"moe_a2a_backend": "mori", "dp_size": 4}, "without the package mori"),
        ({"moe_a2a_backend": "deepep"}, "--dp-size 2 below --tp-size 4"),
        ({"quantization": "fp8"}, "quantised weights (fp8)"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_linear_replayssm": True}, "--enable-linear-replayssm"),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"prefill": "breakable"}, "--cuda-graph-backend-prefill disabled"),
    ],
)
def test_what_is_not_served_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(PatchError) as refusal:
        atom_models_asked(server(**more))
    assert named in str(refusal.value)


def test_several_ranks_of_attention_within_data_parallel_ones_are_served() -> None:
    assert atom_models_asked(server(dp_size=2, tp_size=4)).ok
