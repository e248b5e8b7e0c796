"""The model runs this rank's rows only, and the rows that are sampled from are made known to all ranks.

Why:         vLLM has no token split for prefill context parallelism: every rank would run every row.
How:         wrap the forward call: take this rank's rows of its inputs; afterwards gather the hidden states that
             logits (or prompt log-probabilities) are computed from.
Remove when: vLLM splits the prefill of the architectures in `_config.py` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PATCH = Patch(
    id="vllm.pcp.model_forward",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
    ),
    upstream="vllm-project/vllm#48747",
    changes_graph=True,
)


@PATCH.around
def run_local_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Run the forward pass on this rank's rows."""
    from atom_patches.vllm.adapters.pcp_graphs import own_inputs, rows_of_one_rank
    from atom_patches.vllm.adapters.pcp_step import current_split_step

    def _model_forward(
        self: GPUModelRunner,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        step = current_split_step()
        if step is None:
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        with rows_of_one_rank(self, step.plan.rows_per_rank, step.num_replicated) as graph_rows:
            ids, places, embeds = own_inputs(self, step, input_ids, positions, inputs_embeds, graph_rows)
            hidden_states = original(self, ids, places, intermediate_tensors, embeds, **model_kwargs)
        if self.num_prompt_logprobs:
            return step.gather(hidden_states)
        return step.gather_last(hidden_states)

    return _model_forward
