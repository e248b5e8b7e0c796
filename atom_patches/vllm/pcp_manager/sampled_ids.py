"""All ranks go on with the same sampled token.

Why:         rows that every rank runs, decodes, may differ in their last bit, and a rank that samples another token
             than the one that was returned would go on with another sequence.
How:         after sampling, take the ids of the group's first rank, whose output the engine returns.
Remove when: vLLM agrees on sampled ids over prefill-context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp

PATCH = Patch(
    id="vllm.pcp_manager.sampled_ids",
    target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast",
    ),
    upstream="ROCm/ATOM#2049 is the same symptom",
)


@PATCH.around
def sample_and_agree(original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Sample, then agree on the sampled ids, `[requests, 1]`."""
    from vllm.distributed import get_pcp_group

    from atom_patches.vllm.adapters.pcp_broadcast import broadcast

    def sample(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output, *counts = original(self, *args, **kwargs)
        output.sampled_token_ids = broadcast(get_pcp_group(), output.sampled_token_ids.contiguous(), src=0)
        return (output, *counts)

    return sample
