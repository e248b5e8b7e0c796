"""Many parts by vLLM's merge of two, for which one that rounds its result stands in: refused, or in tolerance."""

from __future__ import annotations

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import contract
from atom_patches.kernels.merge_attention import MERGE_ATTENTION, MERGE_ATTENTION_PARTS, TOLERANCE
from atom_patches.kernels.registry import dtype_name

binding = pytest.importorskip("atom_patches.vllm.kernels.merge_attention")


def merge_attn_states(out: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, lse: Tensor) -> None:
    """vLLM's signature: log-sum-exps are head-major, and the result is written in the parts' dtype."""
    merged, total = MERGE_ATTENTION.reference(out_a, lse_a.mT, out_b, lse_b.mT)
    out.copy_(merged)
    lse.copy_(total.mT)


def parts(count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Parts that weigh about the same, so that every one of them shows in the result."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, 64, 4, 64, generator=generator).to(dtype)
    return outs, torch.randn(count, 4, 64, generator=generator).mT


def merge(call: tuple[Tensor, Tensor]) -> contract.Expected:
    """What the binding makes of the call."""
    with pytest.MonkeyPatch.context() as patch, harness.poisoned():
        patch.setattr(binding, "merge_attn_states", merge_attn_states)
        return contract.results_of(MERGE_ATTENTION_PARTS, binding.merge_attention_parts, call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@harness.examples(20)
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_what_is_served_is_in_tolerance(dtype: torch.dtype, count: int, seed: int) -> None:
    call = parts(count, dtype, seed)
    verdict = binding.supports_merge_attention_parts(*call)
    if not verdict.ok:
        assert count > 2 and dtype != torch.float32
        assert f"would round {count} to {dtype} in between" in verdict.reason
        return
    found, wanted = merge(call), contract.results_of(MERGE_ATTENTION_PARTS, MERGE_ATTENTION_PARTS.reference, call)
    for name, got in found.items():
        contract.compare(name, got, wanted[name], TOLERANCE[dtype_name(dtype)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_refused_would_be_wrong(dtype: torch.dtype) -> None:
    call = parts(4, dtype, 0)
    wanted = contract.results_of(MERGE_ATTENTION_PARTS, MERGE_ATTENTION_PARTS.reference, call)
    with pytest.raises(contract.ContractError, match="elements are out"):
        for name, got in merge(call).items():
            contract.compare(name, got, wanted[name], TOLERANCE[dtype_name(dtype)])
