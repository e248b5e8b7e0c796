"""How experts are spread, by what is asked for and by what their width allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.vllm.adapters import pcp_experts
from atom_patches.vllm.adapters.pcp_experts import (
    expert_mode,
    experts_are_spread,
    unserved_experts,
    whole_expert_bytes,
)


def config(
    width: int = 512,
    ranks: int = 2,
    tensor: int = 1,
    data: int = 1,
    ep: bool = False,
    device: str = "cuda",
    block: int = 0,
    utilization: float = 0.92,
    **text: Any,
) -> Any:
    """Of Qwen3.6-35B-A3B, whose experts are 64.4 GB in bfloat16."""
    described = {"quant_method": "fp8", "weight_block_size": [block, block]} if block else None
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_moe=True,
            hf_text_config=SimpleNamespace(**{"moe_intermediate_size": width, "num_hidden_layers": 40, **text}),
            model_arch_config=SimpleNamespace(quantization_config=described),
            quantization="fp8" if block else None,
            dtype=SimpleNamespace(itemsize=2),
            get_num_experts=lambda: 256,
            get_hidden_size=lambda: 2048,
        ),
        cache_config=SimpleNamespace(gpu_memory_utilization=utilization),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor,
            prefill_context_parallel_size=ranks,
            data_parallel_size=data,
            enable_expert_parallel=ep,
        ),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The GPU's, in GB: by default one that takes no model's experts whole."""
    found = [1.0]
    monkeypatch.setattr(pcp_experts, "device_memory", lambda: round(found[0] * 1e9))
    return found


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 40 * 256 * 3 * 2048 * 512 * 2),
        ({"tensor": 2}, 40 * 256 * 3 * 2048 * 512),
        ({"tensor": 2, "data": 2}, 40 * 256 * 3 * 2048 * 256),
        ({"ranks": 8}, 40 * 256 * 3 * 2048 * 512 * 2),
        ({"block": 128}, 40 * 256 * 3 * 2048 * 512),
        ({"width": 256}, 40 * 256 * 3 * 2048 * 256 * 2),
        # Every second layer, and of these not the fourth.
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, 19 * 256 * 3 * 2048 * 512 * 2),
    ],
)
def test_what_whole_experts_take(options: dict[str, Any], size: int) -> None:
    assert whole_expert_bytes(config(**options)) == size


@pytest.mark.parametrize(
    ("options", "gigabytes", "mode"),
    [
        # 64.4 GB are three fifths of 107.4 GB, and those are 0.92 of 116.7 GB.
        ({}, 116.8, "replicate"),
        ({}, 116.6, "shard"),
        ({"utilization": 0.85}, 116.8, "shard"),
        ({}, 150.8, "replicate"),
        ({}, 85.5, "shard"),
        ({"block": 128}, 85.5, "replicate"),
        ({"tensor": 2}, 85.5, "replicate"),
        ({"ep": True}, 150.8, "ep"),
        ({"ranks": 3}, 85.5, "replicate"),
        # The host's memory, however much there is.
        ({"device": "cpu"}, 1000.0, "shard"),
    ],
)
def test_whole_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, memory: list[float], options: dict[str, Any], gigabytes: float, mode: str
) -> None:
    memory[0] = gigabytes
    monkeypatch.setenv("ATOM_PCP_MOE", "auto")
    assert expert_mode(config(**options)) == mode
    assert experts_are_spread(config(**options)) == (mode != "replicate")
    monkeypatch.setenv("ATOM_PCP_MOE", "shard")
    assert expert_mode(config(**options)) == "shard"


@pytest.mark.parametrize(
    ("asked", "options", "mode"),
    [
        ("", {}, "shard"),
        ("auto", {"ranks": 8}, "shard"),
        ("auto", {"ranks": 3}, "replicate"),
        ("auto", {"ranks": 6, "tensor": 2}, "replicate"),
        ("auto", {"data": 2, "device": "cpu"}, "shard"),
        ("auto", {"data": 8, "device": "cpu"}, "shard"),
        ("auto", {"data": 16, "device": "cpu"}, "replicate"),
        ("auto", {"data": 3, "ep": True}, "ep"),
        ("auto", {"ranks": 2, "device": "cpu", "width": 96}, "replicate"),
        ("auto", {"ranks": 4, "block": 128}, "shard"),
        ("auto", {"ranks": 8, "block": 128}, "replicate"),
        ("auto", {"ep": True, "ranks": 8, "block": 128}, "ep"),
        ("auto", {"ep": True, "ranks": 3}, "ep"),
        ("ep", {"ep": True}, "ep"),
        ("shard", {}, "shard"),
        ("replicate", {}, "replicate"),
    ],
)
def test_what_is_asked_for_is_served(
    monkeypatch: pytest.MonkeyPatch, asked: str, options: dict[str, Any], mode: str
) -> None:
    monkeypatch.setenv("ATOM_PCP_MOE", asked)
    assert list(unserved_experts(config(**options))) == []
    assert expert_mode(config(**options)) == mode


@pytest.mark.parametrize(
    ("asked", "options", "named"),
    [
        ("ep", {}, ["ATOM_PCP_MOE is ep", "pass", "--enable-expert-parallel"]),
        ("shard", {"ep": True}, ["ATOM_PCP_MOE is shard", "--enable-expert-parallel", "leave"]),
        ("replicate", {"ep": True}, ["ATOM_PCP_MOE is replicate", "--enable-expert-parallel", "leave"]),
        ("shard", {"ranks": 3}, ["512", "3 equal slices", "ATOM_PCP_MOE=shard", "unset"]),
        ("shard", {"ranks": 5, "device": "cpu"}, ["512", "5 equal slices of a multiple of 32"]),
        ("shard", {"ranks": 8, "block": 128}, ["512", "8 equal slices of a multiple of 128", "ATOM_PCP_MOE=shard"]),
        ("replicate", {"tensor": 8, "block": 128}, ["512", "8 equal slices of a multiple of 128"]),
        ("replicate", {"tensor": 3}, ["512", "3 equal slices", "--tensor-parallel-size"]),
        ("auto", {"tensor": 3}, ["512", "3 equal slices", "--tensor-parallel-size"]),
        ("auto", {"tensor": 2, "data": 3}, ["6 equal slices", "--tensor-parallel-size times --data-parallel-size"]),
        ("shard", {"data": 3}, ["6 equal slices", "--data-parallel-size times --prefill-context-parallel-size"]),
    ],
)
def test_a_conflict_is_one_line_that_names_the_options(
    monkeypatch: pytest.MonkeyPatch, asked: str, options: dict[str, Any], named: list[str]
) -> None:
    monkeypatch.setenv("ATOM_PCP_MOE", asked)
    [line] = unserved_experts(config(**options))
    for part in named:
        assert part in line


@pytest.mark.parametrize("asked", ["auto", "shard", "ep", "replicate"])
def test_a_model_without_experts_is_asked_nothing(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("ATOM_PCP_MOE", asked)
    dense = config(ranks=3)
    dense.model_config.is_moe = False
    assert list(unserved_experts(dense)) == []
