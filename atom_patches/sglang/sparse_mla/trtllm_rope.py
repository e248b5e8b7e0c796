"""Rotary positions are applied before attention, whatever kernel SGLang would have taken.

Why:         with the TensorRT-LLM kernels and FP8, SGLang leaves them to its backend, which is replaced.
How:         say no where its layers ask whether their backend applies them.
Remove when: the answer comes from the backend.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.sglang.sparse_mla._config import GROUP, sparse_mla_asked

PATCH = Patch(
    id="sglang.sparse_mla.trtllm_rope",
    target=(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:"
        "DeepseekMLAForwardMixin._fuse_rope_for_trtllm_mla"
    ),
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=sparse_mla_asked,
    upstream="none: SGLang's layers know its backends",
)


@PATCH.around
def no(original: Any) -> Any:
    """Whether the backend applies rotary positions: not ours."""

    def _fuse_rope_for_trtllm_mla(self: Any, forward_batch: Any) -> bool:
        return original(self, forward_batch) if self.current_attention_backend not in ("dsa", "nsa") else False

    return _fuse_rope_for_trtllm_mla
