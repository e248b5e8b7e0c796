"""What `vllm.pcp_manager` takes over, leaves to others, and refuses by name; without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.core import PatchError, Verdict
from atom_patches.vllm.pcp import _config as pcp
from atom_patches.vllm.pcp_manager import _config


def config(**changed: Any) -> Any:
    """A dense model on two context-parallel ranks, as vLLM 0.32 describes it; `model__x=1` changes one field."""
    made = SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        weight_transfer_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        attention_config=SimpleNamespace(backend=None),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_offloading_size=None, kv_sharing_fast_prefill=False, enable_prefix_caching=False
        ),
        model_config=SimpleNamespace(
            use_mla=False, is_moe=False, is_hybrid=False, enforce_eager=True, multimodal_config=None,
            runner_type="generate", model_arch_config=SimpleNamespace(quantization_config=None),
            enable_prompt_embeds=False, enable_sleep_mode=False, quantization=None, architecture="Qwen3ForCausalLM",
            get_sliding_window=lambda: None, hf_text_config=SimpleNamespace(moe_intermediate_size=384),
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=2, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1,
            decode_context_parallel_size=1, enable_dbo=False, ubatch_size=0, enable_eplb=False, enable_elastic_ep=False,
            distributed_executor_backend="mp", data_parallel_backend="mp", nnodes=1, enable_expert_parallel=False,
        ),
    )  # fmt: skip
    for name, value in changed.items():
        part, _, field = name.partition("__")
        setattr(getattr(made, f"{part}_config") if field else made, field or part, value)
    return made


@pytest.fixture(params=[True, False], ids=["manager", "no manager"])
def manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the release's model runner has a manager."""
    monkeypatch.setattr(pcp.source, "defined", lambda text: Verdict(request.param, text))
    return request.param


def test_one_feature_serves_a_release(manager: bool) -> None:
    assert _config.managed_pcp(config()).ok is manager
    if manager:
        assert "vllm.pcp_manager" in pcp.pcp_enabled(config()).reason


@pytest.mark.parametrize("changed", [{"parallel__prefill_context_parallel_size": 1}, {"model__use_mla": True}])
def test_it_leaves_alone_what_is_not_its(manager: bool, changed: dict[str, Any]) -> None:
    assert not _config.managed_pcp(config(**changed)).ok


def test_recurrence_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcp.source, "defined", lambda text: Verdict(True, text))
    assert not _config.managed_pcp_with_recurrence(config()).ok
    assert _config.managed_pcp_with_recurrence(config(model__is_hybrid=True)).ok


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER"),
        ({"model__enforce_eager": False}, "--enforce-eager"),
        ({"model__architecture": "Qwen3NextForCausalLM"}, "Qwen3NextForCausalLM; on this release"),
        ({"model__is_hybrid": True, "device__device_type": "cpu"}, "kernels of the platform cpu"),
        ({"parallel__tensor_parallel_size": 2}, "--tensor-parallel-size is 2"),
        ({"parallel__data_parallel_size": 2}, "--data-parallel-size is 2"),
        ({"parallel__distributed_executor_backend": "ray"}, "take mp"),
        ({"model__multimodal_config": SimpleNamespace(language_model_only=False)}, "--language-model-only"),
        ({"model__enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"parallel__decode_context_parallel_size": 2}, "--decode-context-parallel-size is 2"),
        ({"model__architecture": "OtherForCausalLM"}, "OtherForCausalLM"),
    ],
)
def test_a_refusal_names_the_option(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], line: str) -> None:
    monkeypatch.setattr(pcp.source, "defined", lambda text: Verdict(True, text))
    with pytest.raises(PatchError, match=line):
        _config.managed_pcp(config(**changed))


def test_a_hybrid_attends_in_contiguous_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcp.source, "defined", lambda text: Verdict(True, text))
    monkeypatch.setenv("ATOM_PCP_ATTENTION", "zigzag")
    assert _config.managed_pcp(config()).ok
    with pytest.raises(PatchError, match="ATOM_PCP_ATTENTION is zigzag"):
        _config.managed_pcp(config(model__is_hybrid=True))


def test_a_hybrid_keeps_no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcp.source, "defined", lambda text: Verdict(True, text))
    assert _config.managed_pcp(config(cache__enable_prefix_caching=True)).ok
    with pytest.raises(PatchError, match="--no-enable-prefix-caching"):
        _config.managed_pcp(config(model__is_hybrid=True, cache__enable_prefix_caching=True))


def test_text_only_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcp.source, "defined", lambda text: Verdict(True, text))
    assert _config.managed_pcp(config(model__multimodal_config=SimpleNamespace(language_model_only=True))).ok
