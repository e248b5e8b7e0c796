"""The first chunk of each prefill that GatedDeltaNet's metadata holds, on the CPU.

Why:         it is computed on the host with triton.cdiv, and the CPU platform's stand-in for Triton has none.
How:         compute the same tensor with torch.
Remove when: every release in `supports` runs GatedDeltaNet on the CPU by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_runs_it

PATCH = Patch(
    id="vllm.cpu.prepare_chunk_offsets",
    target="vllm.model_executor.layers.fla.ops.index:prepare_chunk_offsets",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_runs_it,
    relies_on=("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",),
    upstream="vllm-project/vllm#41025",
)


@PATCH.around
def _prepare_chunk_offsets(original: Callable[..., Any]) -> Callable[..., Any]:
    from atom_patches.vllm.adapters import gdn_cpu

    def prepare_chunk_offsets(*args: Any, **kwargs: Any) -> Any:
        return gdn_cpu.prepare_chunk_offsets(*args, **kwargs)

    return prepare_chunk_offsets
