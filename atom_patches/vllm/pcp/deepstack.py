"""Qwen3-VL's first layers get the picture features of the rows that this rank runs.

Why:         Qwen3-VL adds further features of a picture to what its first layers give. They lie in buffers of the
             model, by the row of the whole step, and a rank runs some of these rows.
How:         wrap the read of the buffers: first move this rank's rows to their front, where the read begins.
Remove when: vLLM splits the prefill of the architectures in `_config.py` itself, or passes these features as inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_deepstack

if TYPE_CHECKING:
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

PATCH = Patch(
    id="vllm.pcp.deepstack",
    target="vllm.model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration._get_deepstack_input_embeds",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_deepstack,
    relies_on=(
        "vllm.model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration.embed_input_ids",
        "vllm.model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration.forward",
        "vllm.model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration._set_deepstack_input_embeds",
        "vllm.model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration._clear_deepstack_input_embeds",
    ),
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def take_own_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Read the features of this rank's rows."""
    from atom_patches.vllm.adapters.pcp_step import current_split_step

    def _get_deepstack_input_embeds(self: Qwen3VLForConditionalGeneration, num_tokens: int) -> Any:
        step = current_split_step()
        # Without pictures in the step, nothing reads the buffers, which hold what an earlier step left.
        if step is not None and getattr(self, "deepstack_input_embeds_num_tokens", 0):
            # Each forward pass reads once, and what a step leaves behind the front is overwritten before the next read.
            for level in self.deepstack_input_embeds:
                level[: len(step.local_rows)] = level[step.local_rows]
        return original(self, num_tokens)

    return _get_deepstack_input_embeds
