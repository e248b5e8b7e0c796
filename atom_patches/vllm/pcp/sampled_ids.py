"""All ranks go on with the same sampled token.

Why:         ranks hold logits that may differ in their last bit, and a rank that samples another token than the
             one that was returned would go on with another sequence.
How:         after sampling, take the ids of the group's first rank, whose output the engine returns.
Remove when: vLLM agrees on sampled ids over prefill-context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PATCH = Patch(
    id="vllm.pcp.sampled_ids",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast",
    ),
    upstream="ROCm/ATOM#2049 is the same symptom",
)


@PATCH.around
def sample_and_agree(original: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """Sample, then agree on the sampled ids, int32 `[requests, 1]`."""
    from vllm.distributed import get_pcp_group

    from atom_patches.vllm.adapters.pcp_broadcast import broadcast

    def _sample(self: GPUModelRunner, *args: Any, **kwargs: Any) -> SamplerOutput:
        output = original(self, *args, **kwargs)
        output.sampled_token_ids = broadcast(get_pcp_group(), output.sampled_token_ids.contiguous(), src=0)
        return output

    return _sample
