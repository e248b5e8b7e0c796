"""When vLLM's layers attend on this package's kernel, and what they leave to vLLM, by the name of the option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.vllm.attention._config import attention_asked
from atom_patches.vllm.cpu import _conditions

SECTIONS: dict[str, dict[str, Any]] = {
    "parallel_config": {
        "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "enable_dbo": False, "ubatch_size": 0,
    },
    "model_config": {
        "use_mla": False, "is_hybrid": False, "runner_type": "generate", "is_encoder_decoder": False,
        "hf_text_config": SimpleNamespace(model_type="deepseek_v3"), "dtype": "torch.bfloat16",
    },
    "device_config": {"device_type": "cuda"},
    "attention_config": {"backend": None},
    "cache_config": {"cache_dtype": "auto"},
}  # fmt: skip


def engine(**more: Any) -> Any:
    """A configuration as vLLM makes it, with something changed, wherever that is kept."""
    sections = {
        name: SimpleNamespace(**{key: more.get(key, value) for key, value in values.items()})
        for name, values in SECTIONS.items()
    }
    return SimpleNamespace(
        **sections, speculative_config=more.get("speculative"), kv_transfer_config=more.get("transfer")
    )


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_ATTENTION", "1")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"device_type": "cpu"},
        {"cache_dtype": "bfloat16"},
        {"cache_dtype": "float16", "device_type": "cpu"},
        {"hf_text_config": SimpleNamespace(alibi=False)},
        {"use_mla": True},
        {"use_mla": True, "cache_dtype": "bfloat16"},
        {"is_hybrid": True},
    ],
)
def test_it_is_served_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    assert attention_asked(engine(**more)).ok
    for value in ("", "0"):
        monkeypatch.setenv("ATOM_ATTENTION", value)
        verdict = attention_asked(engine(**more))
        assert (verdict.ok, verdict.asked) == (False, False)


def test_where_it_never_ran_is_said() -> None:
    assert "has never run" in attention_asked(engine()).reason


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2: leave it at 1"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2: leave it at 1"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"ubatch_size": 2}, "--ubatch-size"),
        ({"device_type": "xpu"}, "the platform xpu: use one of cpu, cuda"),
        ({"backend": SimpleNamespace(name="FLASHINFER")}, "--attention-backend FLASHINFER: leave one of the two out"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8: use one of auto, bfloat16, float16"),
        ({"cache_dtype": "float16"}, "--kv-cache-dtype float16 beside a model in bfloat16: use auto"),
        ({"speculative": SimpleNamespace(method="ngram")}, "--speculative-config (method ngram)"),
        ({"transfer": object()}, "--kv-transfer-config"),
        ({"use_mla": True, "hf_text_config": SimpleNamespace(index_topk=16)}, "selected latents: leave it to vLLM"),
        ({"use_mla": True, "hf_text_config": SimpleNamespace(compress_ratios=[4])}, "compressed latents"),
        ({"use_mla": True, "is_hybrid": True}, "latents beside recurrent layers"),
        ({"use_mla": True, "cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"runner_type": "pooling"}, "--runner pooling"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"hf_text_config": SimpleNamespace(alibi=True)}, "ALiBi"),
        ({"hf_text_config": SimpleNamespace(position_embedding_type="alibi")}, "ALiBi"),
        ({"hf_text_config": SimpleNamespace(attention_chunk_size=8192)}, "chunks of 8192 tokens"),
    ],
)
def test_what_is_not_served_is_left_to_vllm_and_named(more: dict[str, Any], named: str) -> None:
    verdict = attention_asked(engine(**more))
    assert (verdict.ok, verdict.asked) == (False, True)
    assert named in verdict.reason and "ATOM_ATTENTION does not serve" in verdict.reason


def test_results_that_depend_on_nothing_else_that_runs_are_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT: unset it" in attention_asked(engine()).reason


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"device_type": "cpu", "use_mla": True}, True),
        ({"device_type": "cuda", "use_mla": True}, False),
        ({"device_type": "cpu"}, False),
        ({"device_type": "cpu", "use_mla": True, "speculative": SimpleNamespace(method="ngram")}, False),
    ],
)
def test_what_the_cpu_platform_lacks_for_latents_is_put_in_where_they_are_attended_to(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], wanted: bool
) -> None:
    verdict = _conditions.latents(engine(**more))
    assert (verdict.ok, verdict.asked) == (wanted, False) and verdict.reason
    monkeypatch.setenv("ATOM_ATTENTION", "0")
    assert not _conditions.latents(engine(**more)).ok
