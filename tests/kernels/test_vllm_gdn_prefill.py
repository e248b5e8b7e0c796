"""What the binding of `gdn_prefill` to vLLM adds to vLLM's kernels, for which the references stand in here: padding and
sequences without rows keep their states, and what no sequence owns is 0."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from test_gdn_chain import draw, in_order
from torch import Tensor

from atom_patches.kernels import contract
from atom_patches.kernels.causal_conv1d.reference import causal_conv1d
from atom_patches.kernels.gated_delta_rule.chunk_reference import CHUNK_SIZE
from atom_patches.kernels.gated_delta_rule.chunk_reference import chunk_gated_delta_rule as rule
from atom_patches.kernels.gdn_chain.prefill import GDN_PREFILL, TOLERANCE
from atom_patches.kernels.gdn_gating.reference import gdn_gating
from atom_patches.kernels.l2norm.reference import l2norm

pytest.importorskip("vllm")
if not harness.GPU:
    from atom_patches.vllm.kernels import _gdn_prefill as binding

pytestmark = pytest.mark.skipif(harness.GPU, reason="vLLM's own kernels run here")


def convolved(x: Tensor, weight: Tensor, bias: Tensor, cu: Tensor, state: Tensor, slots: Tensor, *rest: Any) -> Tensor:
    """As vLLM's: what no real sequence owns is not written."""
    y = causal_conv1d(x, weight, bias, cu, state, slots, *rest)
    return y.masked_fill((y == 0).all(1, keepdim=True), torch.nan)


def prepared(
    *, conv_output: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    keys = num_k_heads * head_k_dim
    q, k, v = conv_output.split([keys, keys, conv_output.shape[1] - 2 * keys], dim=1)
    q, k = (l2norm(part.unflatten(1, (num_k_heads, head_k_dim)), 1e-6) for part in (q, k))
    return q, k, v.unflatten(1, (-1, head_v_dim)), *gdn_gating(a, b, A_log, dt_bias)


@pytest.mark.parametrize(("key", "value"), [(20, 30), (128, 128), (20, 7), (16, 33)])
def test_sizes_that_vllms_preparation_compiles(key: int, value: int) -> None:
    """It fills both up to powers of two, and fails to compile if these differ."""
    verdict = binding.supports_gdn_prefill(*in_order(draw([4], key=key, value=value, dtype="bfloat16")))
    assert verdict.ok == ((key, value) in ((20, 30), (128, 128)))
    assert verdict.ok or "same power of two" in verdict.reason


@pytest.mark.parametrize("null_slot", [0, None])
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [([3, 5, 66, 4], [1, 0, 2, -1]), ([3, 0, 4], [2, 1, 3]), ([2, 3], [-1, -1]), ([0, 0], [1, 2]), ([4, 2], [-1, 2])],
)
def test_states_and_rows_of_nobody(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], slots: list[int], null_slot: int | None
) -> None:
    monkeypatch.setattr(binding.conv, "timed_causal_conv1d", convolved)
    monkeypatch.setattr(binding, "fused_post_conv_prep", prepared)
    monkeypatch.setattr(binding, "timed_chunk_gated_delta_rule", lambda *call: rule(*call[:8], CHUNK_SIZE))  # type: ignore[call-arg]
    x: dict[str, Any] = {**draw(lengths, slots, padded=True, seed=1), "null_slot": null_slot}
    for name in ("conv_state", "ssm_state"):
        x[name].nan_to_num_(0.5)
    arguments = in_order(x)
    wanted = contract.results_of(GDN_PREFILL, GDN_PREFILL.reference, contract.clones(arguments))
    found = contract.results_of(GDN_PREFILL, binding.gdn_prefill, contract.clones(arguments))
    for name, got in found.items():
        contract.compare(name, got, wanted[name], TOLERANCE["float32"])
