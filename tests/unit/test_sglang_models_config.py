"""When the ATOM decoders run in SGLang, and what they leave to SGLang's own models, by the name of the option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.core import PatchError
from atom_patches.models import families
from atom_patches.sglang.models import _config
from atom_patches.sglang.models._config import atom_models_asked

STOCK: dict[str, Any] = {
    "attn_cp_size": 1, "dcp_size": 1, "moe_dp_size": 1, "dwdp_size": 1, "moe_dense_tp_size": None,
    "tp_size": 4, "dp_size": 2,
    "enable_two_batch_overlap": False, "enable_single_batch_overlap": False, "enable_pdmux": False,
    "elastic_ep_backend": None, "enable_eplb": False, "ep_num_redundant_experts": 0, "moe_a2a_backend": "none",
    "quantization": None, "torchao_config": "", "enable_lora": False, "encoder_only": False, "language_only": False,
    "enable_linear_replayssm": False, "enable_linear_replayssm_spec": False, "enable_unified_memory": False,
    "enable_page_major_kv_layout": False, "speculative_algorithm": None, "speculative_eagle_topk": None,
    "enable_torch_compile": False, "device": "cuda", "model_impl": "auto", "is_embedding": False,
    "rl_on_policy_target": None, "enable_deterministic_inference": False, "load_format": "auto", "cpu_offload_gb": 0,
    "offload_group_size": -1, "init_expert_location": "trivial", "ep_dispatch_algorithm": None,
}  # fmt: skip


def server(
    architecture: str = "Qwen3NextForCausalLM",
    prefill: str = "",
    backends: tuple[str, str] = ("fa3", "fa3"),
    declared: str | None = None,
    says: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A configuration; `prefill` is the way to capture prefills that somebody asked for, `declared` the checkpoint's
    quantisation as SGLang has found it, and `says` as the checkpoint does."""
    more["get_attention_backends"] = lambda: backends
    hf = SimpleNamespace(architectures=[architecture], quantization_config=says)
    model = SimpleNamespace(hf_config=hf, hf_text_config=None, quantization=declared)
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=prefill or "breakable"))
    more["_cuda_graph_config_locked"] = {("prefill", "backend")} if prefill else set()
    return SimpleNamespace(get_model_config=lambda: model, cuda_graph_config=graphs, **{**STOCK, **more})


@pytest.fixture(autouse=True)
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_MODELS", "1")


@pytest.fixture(autouse=True)
def no_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_SPARSE_MLA", "0")


@pytest.fixture(autouse=True)
def every_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "read", lambda family, hf: None)


@pytest.mark.parametrize(
    ("asked", "architecture", "served"),
    [
        ("", "Qwen3NextForCausalLM", False),
        ("0", "Qwen3NextForCausalLM", False),
        ("1", "Qwen3NextForCausalLM", True),
        ("1", "LlamaForCausalLM", True),
        ("1", "DeepseekV3ForCausalLM", True),
        ("1", "MistralForCausalLM", False),
        ("qwen3", "Qwen3ForCausalLM", True),
        ("qwen3", "Qwen3MoeForCausalLM", False),
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


def test_drafts_of_later_releases_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose configuration is a record, without methods."""
    drafting = server(speculative_algorithm="EAGLE", speculative_eagle_topk=1)
    assert atom_models_asked(drafting).ok
    monkeypatch.setattr(_config, "is_record", lambda config: True)
    assert "--speculative-algorithm EAGLE: leave it out, no draft" in atom_models_asked(drafting).reason
    assert atom_models_asked(server()).ok


def test_weights_in_fp8_with_scales_of_blocks_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "read", lambda family, hf: SimpleNamespace(experts=object(), key_heads=2))
    says = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert atom_models_asked(server(declared="fp8", says=says)).ok
    assert not atom_models_asked(server(quantization="w8a8_fp8", declared="fp8", says=says)).ok


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
        # Later releases say of ranks of attention what --dp-size said before.
        ({"moe_a2a_backend": "deepep", "dp_size": 4, "attn_dp_size": 2}, "--dp-size 2 below --tp-size 4"),
        ({"enable_layernorm_sp": True}, "--enable-layernorm-sp: leave it out"),
        ({"language_model_only": True}, "--language-model-only: leave it out"),
        ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode overlap: use serial"),
        ({"enable_mis": True}, "--enable-mis: leave it out"),
        ({"quantization": "fp8"}, "quantised weights (fp8)"),
        ({"declared": "modelopt_fp8"}, "quantised weights (modelopt_fp8)"),
        ({"declared": "gptq", "says": {"quant_method": "gptq", "bits": 4}}, "GPTQ with 4 bits is not among what"),
        ({"load_format": "sharded_state"}, "--load-format sharded_state"),
        ({"load_format": "remote"}, "--load-format remote"),
        ({"cpu_offload_gb": 4}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-group-size"),
        ({"init_expert_location": "location.json"}, "--init-expert-location"),
        ({"ep_dispatch_algorithm": "fake"}, "--ep-dispatch-algorithm"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"architecture": "MistralForCausalLM"}, "MistralForCausalLM has no ATOM decoder"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_linear_replayssm": True}, "--enable-linear-replayssm"),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        # The size of the tree is SGLang's default here, which nobody has named.
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 10}, "--speculative-algorithm NGRAM with"),
        ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm STANDALONE"),
        ({"architecture": "LlamaForCausalLM", "speculative_algorithm": "EAGLE3"}, "--speculative-algorithm EAGLE3"),
        ({"is_embedding": True}, "--is-embedding"),
        ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target fsdp"),
        (
            {"architecture": "DeepseekV3ForCausalLM", "backends": ("flashinfer", "fa3")},
            "--attention-backend flashinfer",
        ),
        ({"architecture": "DeepseekV32ForCausalLM"}, "sparse attention on SGLang's own kernels (ATOM_SPARSE_MLA is 0)"),
        ({"prefill": "breakable"}, "--cuda-graph-backend-prefill breakable"),
    ],
)
def test_what_is_not_served_is_left_to_sglang_by_name_unless_it_is_required(more: dict[str, Any], named: str) -> None:
    verdict = atom_models_asked(server(**more))
    assert (verdict.ok, verdict.asked) == (False, True)
    assert named in verdict.reason
    with pytest.raises(PatchError, match="--model-impl atom requires an ATOM decoder") as refusal:
        atom_models_asked(server(**more, model_impl="atom"))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("it must not do that"), "the checkpoint: it must not do that"),
        (AttributeError("no rms_norm_eps"), "the checkpoint: AttributeError: no rms_norm_eps"),
        (TypeError("num_experts is None"), "the checkpoint: TypeError: num_experts is None"),
        (KeyError("factor"), "the checkpoint: KeyError: 'factor'"),
    ],
)
def test_a_checkpoint_that_is_not_served_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def read(family: str, hf: Any) -> None:
        raise error

    monkeypatch.setattr(families, "read", read)
    verdict = atom_models_asked(server("LlamaForCausalLM"))
    assert (verdict.ok, verdict.asked) == (False, True)
    assert told in verdict.reason


def test_the_option_asks_for_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOM_MODELS")
    assert atom_models_asked(server("Qwen3ForCausalLM", model_impl="atom")).ok
    with pytest.raises(PatchError, match="MistralForCausalLM has no ATOM decoder"):
        atom_models_asked(server("MistralForCausalLM", model_impl="atom"))


@pytest.mark.parametrize("impl", ["sglang", "transformers"])
def test_another_implementation_that_was_named_runs(impl: str) -> None:
    verdict = atom_models_asked(server("Qwen3ForCausalLM", model_impl=impl))
    assert (verdict.ok, verdict.asked) == (False, False)


def test_prefills_that_somebody_left_uncaptured_are_served() -> None:
    assert atom_models_asked(server(prefill="disabled")).ok


def test_drafts_of_a_chain_are_verified_by_hybrids() -> None:
    assert atom_models_asked(server(speculative_algorithm="EAGLE", speculative_eagle_topk=1)).ok


def test_several_ranks_of_attention_within_data_parallel_ones_are_served() -> None:
    assert atom_models_asked(server(dp_size=2, tp_size=4)).ok
