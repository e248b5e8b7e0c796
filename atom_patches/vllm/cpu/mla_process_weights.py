"""Give attention to latents the weights of its projection on the CPU.

Why:         decodes multiply by the weights that make keys and values of latents. The CPU platform packs a linear
             layer's weights for its kernels and drops them before attention looks at them, and the launch fails.
How:         before attention takes them, have the projection of an identity matrix give them back, bit by bit.
Remove when: every release in `supports` runs attention to latents on the CPU by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import latents

PATCH = Patch(
    id="vllm.cpu.mla_process_weights",
    target="vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_mla",
    when=latents,
    relies_on=(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    ),
    upstream="no upstream change known",
)


@PATCH.around
def _with_weights(original: Callable[..., None]) -> Callable[..., None]:
    from atom_patches.vllm.adapters.packed_weights import give_back

    def process_weights_after_loading(self: Any, act_dtype: Any) -> None:
        give_back(self.kv_b_proj, act_dtype)
        original(self, act_dtype)

    return process_weights_after_loading
