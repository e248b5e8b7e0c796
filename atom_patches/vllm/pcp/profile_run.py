"""Memory is profiled with the most rows that any step puts on one rank.

Why:         vLLM profiles with all rows of the largest step on every rank, and gathers them for the experts: as
             many times the rows of a real step as there are ranks.
How:         wrap the dummy pass and shrink a profiling one to the worst admissible step, replicated short prompts
             included, while the largest buffer of a split step's gathers is held.
Remove when: vLLM profiles the split itself.
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
    id="vllm.pcp.profile_run",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=("vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run",),
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def profile_worst_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the dummy pass, a profiling one with the rows of the worst step."""
    from atom_patches.core import settings
    from atom_patches.runtime.pcp import most_rows
    from atom_patches.vllm.adapters.pcp_attention import largest_exchange

    def _dummy_run(self: GPUModelRunner, num_tokens: int, *args: Any, is_profile: bool = False, **kwargs: Any) -> Any:
        ranks = self.parallel_config.prefill_context_parallel_size
        if not is_profile or ranks == 1:
            return original(self, num_tokens, *args, is_profile=is_profile, **kwargs)
        rows = most_rows(num_tokens, self.max_num_reqs, ranks, settings.pcp_min_rows())
        held: torch.Tensor = self.input_ids.gpu.new_empty(largest_exchange(self, num_tokens, rows), dtype=self.dtype)
        outputs = original(self, rows, *args, is_profile=True, **kwargs)
        del held
        return outputs

    return _dummy_run
