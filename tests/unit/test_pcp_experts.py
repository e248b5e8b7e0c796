"""How experts are spread, by what is asked for and by what their width allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_patches.vllm.adapters.pcp_experts import expert_mode, unserved_experts


def config(
    width: int = 512,
    ranks: int = 2,
    tensor: int = 1,
    data: int = 1,
    ep: bool = False,
    device: str = "cuda",
    block: int = 0,
) -> Any:
    described = {"quant_method": "fp8", "weight_block_size": [block, block]} if block else None
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_moe=True,
            hf_text_config=SimpleNamespace(moe_intermediate_size=width),
            model_arch_config=SimpleNamespace(quantization_config=described),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor,
            prefill_context_parallel_size=ranks,
            data_parallel_size=data,
            enable_expert_parallel=ep,
        ),
        device_config=SimpleNamespace(device_type=device),
    )


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
