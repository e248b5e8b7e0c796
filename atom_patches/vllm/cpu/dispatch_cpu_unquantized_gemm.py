"""Leave the three-dimensional weights of a convolution out of the CPU's matrix multiplication set-up.

Why:         GatedDeltaNet keeps its convolution filter in a linear layer with weights [D, 1, W]; upstream unpacks two
             dimensions and fails, and would drop the weights that the convolution reads.
How:         skip layers whose weights are not a matrix; they are never multiplied.
Remove when: every release in `supports` runs GatedDeltaNet on the CPU by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_runs_it

PATCH = Patch(
    id="vllm.cpu.dispatch_cpu_unquantized_gemm",
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_runs_it,
    relies_on=(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
        "vllm.model_executor.layers.mamba.gdn_linear_attn:GatedDeltaNetAttention.__init__",
    ),
    upstream="vllm-project/vllm#41025",
)


@PATCH.around
def _dispatch_cpu_unquantized_gemm(original: Callable[..., None]) -> Callable[..., None]:
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        if layer.weight.dim() == 2:
            original(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm
