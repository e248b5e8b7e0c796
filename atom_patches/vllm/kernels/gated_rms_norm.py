"""vLLM's gated norm as GatedDeltaNet calls it: heads in rows, norm before gate."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.fla.ops.layernorm_guard import rmsnorm_fn

from atom_patches.kernels.registry import YES, Verdict, no


def supports_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Verdict:
    return YES if x.numel() else no("vLLM launches no kernel for zero rows")


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    size = x.shape[-1]
    y = rmsnorm_fn(
        x.reshape(-1, size),
        weight,
        None,
        z=gate.reshape(-1, size),
        eps=eps,
        norm_before_gate=True,
        activation=activation,
    )
    return y.view(x.shape)
