"""Rotary positions and the cache of latents are not left to one of AITER's kernels ahead of attention.

Why:         on AMD's CDNA 4, with the TileLang kernels, SGLang's layers apply rotary positions, cast queries and write
             the cache in one kernel, in the format of that backend, which is replaced.
How:         say no where its layers ask whether they do.
Remove when: the answer comes from the backend.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.sglang.sparse_mla._config import GROUP, sparse_mla_asked

PATCH = Patch(
    id="sglang.sparse_mla.tilelang_rope",
    target=(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:"
        "DeepseekMLAForwardMixin._skip_rope_for_dsa_tilelang_fused"
    ),
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=sparse_mla_asked,
    upstream="none: SGLang's layers know its backends",
)


@PATCH.around
def no(original: Any) -> Any:
    """Whether a fused kernel applies rotary positions: it does only for TileLang's sparse attention."""
    del original

    def _skip_rope_for_dsa_tilelang_fused(self: Any) -> bool:
        del self
        return False

    return _skip_rope_for_dsa_tilelang_fused
