"""A split step's positions on several axes are those of this rank's rows.

Why:         M-RoPE's positions are computed from the batch's requests, each with all its rows of the step.
How:         wrap the preparation of further inputs: prepare those of the whole step, and take this rank's rows.
Remove when: vLLM's manager serves models with M-RoPE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp

if TYPE_CHECKING:
    import torch

PATCH = Patch(
    id="vllm.pcp_manager.model_inputs",
    target="vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_inputs",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=("vllm.v1.worker.gpu.pcp_manager:PCPManager",),
    upstream="vllm-project/vllm#48747",
    changes_graph=True,
)


@PATCH.around
def take_own_positions(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Prepare the whole step's inputs, and take this rank's rows."""
    from atom_patches.vllm.adapters.pcp_manager import SplitBatch, whole_batch

    def prepare_inputs(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor | None]:
        inputs = original(self, whole_batch(input_batch), *args, **kwargs)
        if not isinstance(input_batch, SplitBatch):
            return inputs
        assert input_batch.step is not None
        return {name: input_batch.step.take(rows, dim=-1) for name, rows in inputs.items()}

    return prepare_inputs
