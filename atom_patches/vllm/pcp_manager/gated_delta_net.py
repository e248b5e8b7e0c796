"""GatedDeltaNet layers run this rank's rows, and every rank learns every request's final state.

Why:         the recurrence runs through a whole request, and a rank holds a part of its rows.
How:         wrap the layer's core, inside its custom op, and run it in one of the ways that ATOM_PCP_GDN names: mostly
             the engine's own core on the rows at hand, from the state that the other ranks' rows lead to.
Remove when: vLLM serves prefill context parallelism for GatedDeltaNet layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp_with_recurrence

if TYPE_CHECKING:
    import torch

LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

PATCH = Patch(
    id="vllm.pcp_manager.gated_delta_net",
    target=f"{LAYER}:QwenGatedDeltaNetAttention._forward_core",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp_with_recurrence,
    relies_on=(
        f"{LAYER}:qwen_gdn_attention_core",
        f"{LAYER}:QwenGatedDeltaNetAttention.forward_cuda",
        f"{LAYER}:QwenGatedDeltaNetAttention.__init__",
        "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
        "vllm.model_executor.layers.mamba.mamba_utils:MambaStateShapeCalculator.gated_delta_net_state_shape",
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast",
    ),
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def run_own_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Run the layer's core on this rank's rows."""
    from atom_patches.vllm.adapters.pcp_gdn import run_core
    from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
    from atom_patches.vllm.adapters.pcp_gdn.core_layer import engine_layer
    from atom_patches.vllm.adapters.pcp_step import current_split_step

    def _forward_core(
        self: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        step = current_split_step()
        if step is None:
            original(self, mixed_qkv, b, a, core_attn_out)
        else:
            run_core(CoreCall(engine_layer(original, self), step, mixed_qkv, b, a, core_attn_out))

    return _forward_core
