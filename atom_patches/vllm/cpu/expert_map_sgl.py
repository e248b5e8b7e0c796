"""Route to the experts that a rank holds, in the packed AMX kernel.

Why:         under expert parallelism the CPU kernel ignores the map from global to local experts and reads
             weights that the rank does not hold.
How:         wrap the routing: experts of other ranks get weight 0, the others their local number.
Remove when: every release in `supports` honours expert_map on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import expert_parallel

PATCH = Patch(
    id="vllm.cpu.expert_map_sgl",
    target="vllm.model_executor.layers.fused_moe.cpu_fused_moe:SGLFusedMOE.__call__",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_ep",
    when=expert_parallel,
    relies_on=(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply_monolithic",
    ),
    upstream="no upstream change known",
    changes_graph=True,
)


@PATCH.around
def _expert_map_sgl(original: Callable[..., Any]) -> Callable[..., Any]:
    from atom_patches.vllm.adapters.cpu_expert_map import with_local_experts

    return with_local_experts(original)
