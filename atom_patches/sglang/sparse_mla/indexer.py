"""The indexer of DeepSeek's layers is this package's.

Why:         SGLang's own leaves keys and scores to kernels that are not everywhere, in layouts that differ by kernel.
How:         give the name by which DeepSeek's layers make their indexer to ours, whose parameters have the same names.
Remove when: SGLang's indexer takes its kernels from a registry that plugins can add to.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.sglang.sparse_mla._config import GROUP, sparse_mla_asked

PATCH = Patch(
    id="sglang.sparse_mla.indexer",
    target="sglang.srt.models.deepseek_v2:Indexer",
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=sparse_mla_asked,
    relies_on=(
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.__init__",
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:"
        "DeepseekMLAForwardMixin.forward_absorb_prepare",
        "sglang.srt.models.deepseek_common.deepseek_weight_loader:_load_fused_indexer_wk",
    ),
    upstream="none: SGLang chooses among its own kernels",
)


@PATCH.around
def build_ours(original: Any) -> Any:
    """The class of which DeepSeek's layers make their indexer."""
    del original
    from atom_patches.sglang.adapters.sparse_mla.indexer import SparseIndexer

    return SparseIndexer
