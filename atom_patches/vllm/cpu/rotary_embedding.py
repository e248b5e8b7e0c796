"""Turn all heads of a query on the CPU, not only the first.

Why:         attention to latents hands its rotary positions queries and keys by head, `[rows, heads, size]`; the CPU
             platform's kernel takes that for one head a row and leaves the others as they are.
How:         the layer's own formula in plain torch, which the CPU platform has for its other rotary positions.
Remove when: every release in `supports` turns all heads of such a query on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import latents

PATCH = Patch(
    id="vllm.cpu.rotary_embedding",
    target="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_mla",
    when=latents,
    relies_on=("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_native",),
    upstream="no upstream change known",
    changes_graph=True,
)


@PATCH.around
def _turn_all_heads(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() < 3:
            return original(self, positions, query, key)
        return self.forward_native(positions, query, key)

    return forward_cpu
