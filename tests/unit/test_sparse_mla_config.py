"""Who gets sparse attention on this package's kernels, and which options are refused by name."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.core import PatchError, Verdict
from atom_patches.sglang.sparse_mla import _config
from atom_patches.sglang.sparse_mla._config import OPTION, sparse_mla_asked


def a_configuration(**changed: Any) -> Any:
    """What SGLang resolves for DeepSeek-V3.2 on a machine without its kernels."""
    hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048, index_head_dim=128)
    for name in [name for name in changed if name.startswith("index_") or name in ("architectures", "cli_factor")]:
        setattr(hf_config, name, changed.pop(name))
    backends = changed.pop("backends", ("dsa", "dsa"))
    prefill = changed.pop("prefill_graphs", None)
    values: dict[str, Any] = {
        "device": "cpu", "attention_backend": backends[0], "get_attention_backends": lambda: backends,
        "get_model_config": lambda: SimpleNamespace(hf_config=hf_config), "attn_cp_size": 1, "dcp_size": 1,
        "enable_prefill_cp": False, "enable_two_batch_overlap": False, "enable_single_batch_overlap": False,
        "enable_pdmux": False, "pp_size": 1, "moe_a2a_backend": "none",
        "speculative_algorithm": None, "speculative_eagle_topk": None, "speculative_draft_attention_backend": "triton",
        "enable_hisparse": False, "enable_dsa_cache_layer_split": False,
        "enable_return_indexer_topk": False, "enable_deterministic_inference": False, "enable_torch_compile": False,
        "enable_lora": None, "disaggregation_mode": "null", "dsa_prefill_backend": None, "dsa_decode_backend": None,
        "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend=prefill or "breakable")),
        "_cuda_graph_config_locked": {("prefill", "backend")} if prefill else set(),
    }  # fmt: skip
    return SimpleNamespace(**values | changed)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPTION, raising=False)


def test_where_sglang_has_no_kernels() -> None:
    assert sparse_mla_asked(a_configuration()) == Verdict(True, "SGLang has no sparse attention for cpu")
    assert not sparse_mla_asked(a_configuration(device="npu")).ok


def test_the_setting_decides_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTION, "0")
    assert not sparse_mla_asked(a_configuration()).ok
    monkeypatch.setenv(OPTION, "1")
    assert sparse_mla_asked(a_configuration(device="cuda")).ok
    with pytest.raises(PatchError, match="--device npu: use one of cpu, cuda"):
        sparse_mla_asked(a_configuration(device="npu"))


@pytest.mark.parametrize(
    ("hip", "major", "installed", "ours"),
    [
        (None, 9, {"deep_gemm", "sgl_kernel"}, False),
        (None, 10, {"deep_gemm", "sgl_kernel"}, False),
        (None, 9, {"sgl_kernel"}, True),
        (None, 8, {"deep_gemm", "sgl_kernel"}, True),
        (None, 12, {"deep_gemm", "sgl_kernel"}, True),
        ("6.4", 9, {"fast_hadamard_transform", "tilelang"}, False),
        ("6.4", 9, {"tilelang"}, True),
        ("6.4", 9, {"fast_hadamard_transform", "aiter"}, True),
    ],
)
def test_where_its_kernels_cannot_run(
    hip: str | None, major: int, installed: set[str], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    assert sparse_mla_asked(a_configuration(device="cuda")).ok is ours


@pytest.mark.parametrize(("installed", "ours"), [({"deep_gemm", "flashinfer"}, False), ({"deep_gemm"}, True)])
def test_sglang_has_kernels_of_flashinfer_for_glm_on_small_blackwells(
    installed: set[str], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    chosen = dict.fromkeys(("dsa_prefill_backend", "dsa_decode_backend"), "flashinfer_sparse_mla")
    assert sparse_mla_asked(a_configuration(device="cuda", **chosen)).ok is ours


@pytest.mark.parametrize(
    "changed",
    [
        {"architectures": ["DeepseekV3ForCausalLM"], "index_topk": None},
        {"architectures": ["LongcatFlashForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"], "index_topk": None},
        {"backends": ("triton", "triton")},
    ],
)
def test_other_models_and_backends_are_left_alone(changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTION, "1")
    assert not sparse_mla_asked(a_configuration(**changed, enable_lora=True)).ok


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"attn_cp_size": 2}, "--attn-cp-size 2: leave it at 1"),
        ({"dcp_size": 2}, "--dcp-size 2: leave it at 1"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"pp_size": 2, "index_topk_freq": 4}, "--pp-size 2"),
        ({"pp_size": 2, "index_topk_pattern": "FSS"}, "--pp-size 2"),
        ({"pp_size": 2, "cli_factor": 2}, "--pp-size 2"),
        ({"moe_a2a_backend": "pplx"}, "--moe-a2a-backend pplx: use another one"),
        ({"index_head_dim": 96}, "index_head_dim 96: use one with a power of two"),
        ({"backends": ("dsa", "triton")}, "use dsa for both"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE: use one of STANDALONE"),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 10}, "--speculative-algorithm NGRAM"),
        ({"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
        (
            {"speculative_algorithm": "STANDALONE", "speculative_draft_attention_backend": None},
            "name the draft's own --speculative-draft-attention-backend",
        ),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"enable_dsa_cache_layer_split": True}, "--enable-dsa-cache-layer-split"),
        ({"enable_return_indexer_topk": True}, "--enable-return-indexer-topk"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"prefill_graphs": "breakable"}, "--cuda-graph-backend-prefill breakable: use disabled"),
        ({"index_init_tokens": 4}, "index_init_tokens"),
        ({"index_local_tokens": 4}, "index_local_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changed: Any, named: str) -> None:
    with pytest.raises(PatchError) as refused:
        sparse_mla_asked(a_configuration(**changed))
    assert named in str(refused.value)
    assert str(refused.value).count("\n  - ") == 1
    assert f"{OPTION}=0" in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"pp_size": 2},
        {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 1},
        {"prefill_graphs": "disabled"},
        {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk_freq": 4},
    ],
)
def test_what_can_be_served_is(changed: Any) -> None:
    assert sparse_mla_asked(a_configuration(**changed)).ok


def test_nothing_is_refused_where_it_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "without_own_kernels", lambda config: _config.Verdict(False, "theirs run"))
    assert sparse_mla_asked(a_configuration(enable_lora=True)) == Verdict(False, "theirs run")
