"""When the ATOM decoders run in vLLM, and what they leave to vLLM's own models, by the name of the option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.core import PatchError
from atom_patches.vllm.bootstrap.model_config import create_model_config
from atom_patches.vllm.models._config import atom_models_asked

TEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "hidden_act": "silu", "layer_types": ["linear_attention"] * 3 + ["full_attention"], "intermediate_size": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
PARALLEL: dict[str, Any] = {
    "decode_context_parallel_size": 1, "tensor_parallel_size": 1,
    "enable_eplb": False, "enable_elastic_ep": False, "enable_dbo": False, "ubatch_size": 0,
    "use_sequence_parallel_moe": False,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "architecture": "Qwen3NextForCausalLM", "model_impl": "auto", "quantization": None, "runner_type": "generate",
    "convert_type": "none", "sliding": None, "enable_return_routed_experts": False,
    "use_mla": True,
}  # fmt: skip


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def engine(**more: Any) -> Any:
    """A configuration as vLLM makes it, with something changed, wherever that is kept."""

    def section(values: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**{name: more.get(name, value) for name, value in values.items()})

    text = SimpleNamespace(**{**TEXT, **more.get("text", {})})
    model = section(MODEL)
    model.hf_text_config, model.get_sliding_window = text, lambda: model.sliding
    model.hf_config = SimpleNamespace(quantization_config=more.get("declared"))
    return SimpleNamespace(
        model_config=model,
        parallel_config=section(PARALLEL),
        device_config=section({"device_type": "cuda"}),
        cache_config=section({"mamba_cache_mode": "align"}),
        load_config=section({"load_format": "auto"}),
        compilation_config=SimpleNamespace(pass_config=section({"enable_sp": False})),
        offload_config=SimpleNamespace(
            uva=section({"cpu_offload_gb": 0}), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        **{name: more.get(name) for name in ("speculative_config", "lora_config")},
    )


@pytest.fixture(autouse=True)
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_MODELS", "1")


@pytest.mark.parametrize(
    ("asked", "more", "served", "told"),
    [
        ("", {}, False, False),
        ("0", {}, False, False),
        ("1", {}, True, False),
        ("qwen3_5", {}, False, False),
        ("qwen3_5,qwen3_next", {}, True, False),
        ("1", {"architecture": "MambaForCausalLM"}, False, True),
        ("1", {"architecture": "Qwen3_5ForCausalLM"}, False, True),  # vLLM has no such class
        ("1", {"model_impl": "transformers"}, False, False),
        ("1", {"model_impl": "vllm"}, False, False),
        ("", {"model_impl": "atom"}, True, False),
        ("1", {"quantization": "fp8", "declared": FP8}, True, False),
    ],
)
def test_a_family_is_served_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, more: dict[str, Any], served: bool, told: bool
) -> None:
    monkeypatch.setenv("ATOM_MODELS", asked)
    verdict = atom_models_asked(engine(**more))
    assert (verdict.ok, verdict.asked) == (served, told), verdict.reason


UNSERVED = [
    ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
    ({"enable_eplb": True}, "--enable-eplb"),
    ({"enable_elastic_ep": True}, "--enable-elastic-ep"),
    ({"enable_dbo": True}, "--enable-dbo"),
    ({"ubatch_size": 2}, "--ubatch-size"),
    ({"use_sequence_parallel_moe": True}, "--enable-expert-parallel"),
    ({"tensor_parallel_size": 4}, "--tensor-parallel-size 4"),
    ({"quantization": "fp8"}, "quantised weights (fp8), which the checkpoint's are not: leave --quantization out"),
    ({"quantization": "gptq_marlin", "declared": GPTQ}, "quantised weights (gptq_marlin): GPTQ with 4 bits of experts"),
    ({"quantization": "moe_wna16", "declared": GPTQ}, "GPTQ with 4 bits is not among what is served"),
    ({"quantization": "fp8", "declared": {**FP8, "activation_scheme": "static"}}, "activation_scheme must be"),
    ({"runner_type": "pooling"}, "--runner pooling"),
    ({"convert_type": "embed"}, "--convert embed"),
    ({"sliding": 128}, "a sliding window of 128"),
    ({"load_format": "sharded_state"}, "--load-format sharded_state"),
    ({"load_format": "runai_streamer_sharded"}, "--load-format runai_streamer_sharded"),
    ({"load_format": "tensorizer"}, "--load-format tensorizer"),
    ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
    ({"speculative_config": SimpleNamespace(method="ngram")}, "--speculative-config (method ngram)"),
    ({"lora_config": object()}, "--enable-lora"),
    ({"mamba_cache_mode": "all"}, "--mamba-cache-mode all"),
    ({"enable_sp": True}, "pass_config.enable_sp"),
    ({"cpu_offload_gb": 4}, "--cpu-offload-gb"),
    ({"device_type": "xpu"}, "the platform xpu"),
    ({"text": {"layer_scale": True}}, "layer_scale"),
    ({"text": {"logit_scale": 0.5}}, "logit_scale"),
    ({"text": {"hidden_act": "gelu"}}, "hidden_act"),
    ({"text": {"num_experts": None}}, "the checkpoint: TypeError"),
]


@pytest.mark.parametrize(("more", "named"), UNSERVED)
def test_what_is_not_served_is_left_to_stock_and_named(more: dict[str, Any], named: str) -> None:
    verdict = atom_models_asked(engine(**more))
    assert not verdict.ok and verdict.asked
    assert named in verdict.reason


def test_results_that_depend_on_nothing_else_that_runs_are_stock_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert atom_models_asked(engine()).ok
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    verdict = atom_models_asked(engine())
    assert (verdict.ok, verdict.asked) == (False, True)
    assert "VLLM_BATCH_INVARIANT: unset it" in verdict.reason


LATENTS: dict[str, Any] = {
    "q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.0, "index_n_heads": 4, "index_head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(("version", "more"), [("V3", {}), ("V32", {"index_topk": 16})])
def test_a_cache_of_keys_and_values_is_stock_s(version: str, more: dict[str, int]) -> None:
    """The variable leaves families alone that have no latents."""
    deepseek: dict[str, Any] = {"architecture": f"Deepseek{version}ForCausalLM", "text": {**LATENTS, **more}}
    assert atom_models_asked(engine(**deepseek)).ok
    verdict = atom_models_asked(engine(**deepseek, use_mla=False))
    assert (verdict.ok, verdict.asked) == (False, True)
    assert "VLLM_MLA_DISABLE: unset it" in verdict.reason
    assert atom_models_asked(engine(use_mla=False)).ok


def test_a_reason_is_given_once() -> None:
    assert atom_models_asked(engine(text={"logit_scale": 0.5})).reason.count("logit_scale must be") == 1


def test_the_implementation_that_is_required_is_an_error_where_it_cannot_run() -> None:
    with pytest.raises(PatchError, match="--enable-eplb"):
        atom_models_asked(engine(model_impl="atom", enable_eplb=True))
    with pytest.raises(PatchError, match="MambaForCausalLM has no ATOM decoder"):
        atom_models_asked(engine(model_impl="atom", architecture="MambaForCausalLM"))


def test_an_implementation_that_is_required_and_switched_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    create = create_model_config(lambda args: "made")
    assert create(SimpleNamespace(model_impl="atom")) == "made"
    monkeypatch.setenv("ATOM_PATCH_VLLM_MODELS", "0")
    assert create(SimpleNamespace(model_impl="auto")) == "made"
    with pytest.raises(PatchError, match="--model-impl atom requires vllm.models, but ATOM_PATCH_VLLM_MODELS=0"):
        create(SimpleNamespace(model_impl="atom"))


def test_heads_that_no_recurrent_layer_has_bind_nobody() -> None:
    llama = {"model_type": "llama", "layer_types": None, "linear_num_key_heads": 0}
    assert atom_models_asked(engine(architecture="LlamaForCausalLM", tensor_parallel_size=4, text=llama)).ok
