"""GatedDeltaNet layers run this rank's rows, and every rank learns every request's final state.

Why:         the recurrence runs through a whole request, and a rank holds a part of its rows.
How:         wrap the layer's core, inside its custom op, and run it in one of the ways that ATOM_PCP_GDN names: mostly
             the engine's own core on the rows at hand, from the state that the other ranks' rows lead to.
Remove when: vLLM serves prefill context parallelism for GatedDeltaNet layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp import _recurrence
from atom_patches.vllm.pcp._config import pcp_with_recurrence

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNetAttention

PATCH = Patch(
    id="vllm.pcp.gated_delta_net",
    target="vllm.model_executor.layers.mamba.gdn_linear_attn:GatedDeltaNetAttention._forward_core",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_recurrence,
    relies_on=(
        "vllm.model_executor.layers.mamba.gdn_linear_attn:gdn_attention_core",
        "vllm.model_executor.layers.mamba.gdn_linear_attn:GatedDeltaNetAttention.forward_cuda",
        "vllm.model_executor.layers.mamba.gdn_linear_attn:GatedDeltaNetAttention.__init__",
        "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
        "vllm.model_executor.layers.mamba.mamba_utils:MambaStateShapeCalculator.gated_delta_net_state_shape",
        "vllm.model_executor.layers.fla.ops.fused_gdn_prefill_post_conv:fused_post_conv_prep",
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast",
    ),
    upstream="vllm-project/vllm#48747",
)


def details() -> Iterator[str]:
    """What `explain` adds: the expected costs that `ATOM_PCP_GDN=auto` chooses by."""
    return _recurrence.cost_table()


@PATCH.around
def run_own_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Run the layer's core on this rank's rows."""
    from atom_patches.vllm.adapters.pcp_gdn import run_core
    from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
    from atom_patches.vllm.adapters.pcp_gdn.core_layer import engine_layer
    from atom_patches.vllm.adapters.pcp_step import current_split_step

    def _forward_core(
        self: GatedDeltaNetAttention,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        step = current_split_step()
        if step is None:
            original(self, mixed_qkv, b, a, core_attn_out)
        else:
            # A graph may have padded the rows.
            own = (rows[: step.plan.rows_per_rank] for rows in (mixed_qkv, b, a, core_attn_out))
            run_core(CoreCall(engine_layer(original, self), step, *own))

    return _forward_core
