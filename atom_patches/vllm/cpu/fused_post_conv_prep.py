"""Heads, normalisation and gates of a prefill after its convolution, on the CPU.

Why:         the CPU platform has no Triton, and upstream has no other implementation in this release.
How:         call the torch reference of `atom_patches.kernels` through an adapter with upstream's signature.
Remove when: every release in `supports` runs GatedDeltaNet on the CPU by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_runs_it

PATCH = Patch(
    id="vllm.cpu.fused_post_conv_prep",
    target="vllm.model_executor.layers.fla.ops.fused_gdn_prefill_post_conv:fused_post_conv_prep",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_runs_it,
    relies_on=("vllm.model_executor.layers.mamba.gdn_linear_attn:GatedDeltaNetAttention._forward_core",),
    upstream="vllm-project/vllm#41025",
)


@PATCH.around
def _fused_post_conv_prep(original: Callable[..., Any]) -> Callable[..., Any]:
    from atom_patches.vllm.adapters import gdn_cpu

    def fused_post_conv_prep(*args: Any, **kwargs: Any) -> Any:
        return gdn_cpu.fused_post_conv_prep(*args, **kwargs)

    return fused_post_conv_prep
