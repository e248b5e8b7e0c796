"""What bindings to SGLang add to its kernels, for which stand-ins compute here, and what they refuse."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import harness
import pytest
import torch
from torch import Tensor

from atom_patches.kernels import contract
from atom_patches.kernels.causal_conv1d import CAUSAL_CONV1D
from atom_patches.kernels.fused_moe import MOE_ROUTING, ROUTING_TOLERANCE
from atom_patches.kernels.merge_attention import MERGE_ATTENTION, TOLERANCE

pytestmark = pytest.mark.skipif(harness.GPU, reason="SGLang's own kernels run here")

CONV = "sglang.srt.layers.attention.mamba.causal_conv1d"
Bound = Callable[..., ModuleType]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bound]:
    """Import a binding over stand-ins: modules by their names, with their functions."""
    before = set(sys.modules)

    def load(family: str, **modules: dict[str, Any]) -> ModuleType:
        for name, functions in modules.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                module = sys.modules.get(".".join(parts[:i])) or ModuleType(parts[i - 1])
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), module)
            vars(sys.modules[name]).update(functions)
        return importlib.import_module(f"atom_patches.sglang.kernels.{family}")

    yield load
    for name in set(sys.modules) - before:
        if name.startswith("atom_patches.sglang.kernels."):
            del sys.modules[name]


def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """+inf means no keys; where neither part has any, zero is divided by zero. The log-sum-exps are read in line."""
    assert lse_a.is_contiguous() and lse_b.is_contiguous()
    lse_a, lse_b = (lse.masked_fill(lse.isinf(), -torch.inf) for lse in (lse_a, lse_b))
    peak = torch.maximum(lse_a, lse_b)
    weights = torch.stack([(lse_a - peak).exp(), (lse_b - peak).exp()])
    share = (weights / weights.sum(0))[..., None]
    return (out_a.float() * share[0] + out_b.float() * share[1]).to(out_a.dtype), peak + weights.sum(0).log()


def test_parts_without_keys(bound: Bound) -> None:
    binding = bound("merge_attention", sgl_kernel={"merge_state_v2": merged})
    generator = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 9, 3, 8, generator=generator), torch.randn(2, 3, 9, generator=generator).mT * 10
    for part, mark in ((0, -torch.inf), (1, torch.inf)):
        lses[part, part : part + 5] = mark
        outs[part, part : part + 5] = 0.0
    call = outs[0], lses[0], outs[1], lses[1]
    assert MERGE_ATTENTION.reference(*call)[1].isinf().any()
    with harness.poisoned():
        found = contract.results_of(MERGE_ATTENTION, binding.merge_attention, contract.clones(call))
    wanted = contract.results_of(MERGE_ATTENTION, MERGE_ATTENTION.reference, call)
    for name, promised in harness.promises(MERGE_ATTENTION, call).items():
        assert harness.layout(found[name]) == harness.layout(promised)
        contract.compare(name, found[name], wanted[name], TOLERANCE["float32"])


def routed(scores: Tensor, bias: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Strides of the bias are not asked for."""
    in_line = bias.as_strided(bias.shape, (1,))
    options = {"scaling": options["routed_scaling_factor"], "renormalize": options["renormalize"]}
    return MOE_ROUTING.reference(
        scores, topk, "sigmoid", options["renormalize"], in_line, 1, 1, options["scaling"]
    )  # fmt: skip


def test_a_routing_bias_with_other_values_in_between(bound: Bound) -> None:
    binding = bound(
        "fused_moe",
        **{
            "sgl_kernel": {"silu_and_mul": None},
            "sglang.kernels.ops.elementwise.elementwise": {"fused_gate_sigmoid_mul_add": None},
            "sglang.kernels.ops.moe.moe_fused_gate": {"moe_fused_gate": routed},
            "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe": {"fused_experts_impl": None},
            "sglang.srt.runtime_context": {"get_context": None},
            "sglang.srt.server_args": {"ServerArgs": None},
        },
    )
    generator = torch.Generator().manual_seed(1)
    logits, bias = torch.randn(5, 16, generator=generator), harness.spread(torch.randn(16, generator=generator))
    call = logits, 3, "sigmoid", True, bias, 1, 1, 1.0
    assert binding.supports_moe_routing(*call).ok
    found, wanted = (contract.outputs_of(run(*call)) for run in (binding.moe_routing, MOE_ROUTING.reference))
    for name, got in found.items():
        contract.compare(name, got, wanted[name], ROUTING_TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_rounded_to_the_inputs_dtype(bound: Bound, dtype: torch.dtype) -> None:
    binding = bound("causal_conv1d", **{CONV: {"causal_conv1d_fn": None, "causal_conv1d_update": None}})
    x, weight = torch.zeros(6, 8, dtype=dtype), torch.zeros(8, 4, dtype=dtype)
    state, slots = torch.zeros(3, 8, 3, dtype=dtype), torch.tensor([1, 2])
    call = x, weight, None, torch.tensor([0, 2, 6]), state, slots, torch.tensor([True, False]), "silu", 0
    verdict = binding.supports_causal_conv1d(*call)
    assert verdict.ok == (dtype == torch.float32)
    assert verdict.ok or f"rounds each product to {dtype}" in verdict.reason
    assert binding.supports_prefill(*call[:5], call[6]).ok, "within a layer it serves"
    assert binding.supports_causal_conv1d_update(x[:2], weight, None, state, slots, "silu", 0).ok
    assert CAUSAL_CONV1D.reference(*call).shape == x.shape
