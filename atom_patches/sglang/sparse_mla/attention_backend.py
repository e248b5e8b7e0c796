"""SGLang's sparse attention backend is this package's.

Why:         SGLang's own runs on DeepGEMM and FlashMLA, or on TileLang and AITER, and not where they are missing.
How:         where the name of a backend becomes a backend, answer to "dsa" with ours. SGLang's pools, its request table
             and its DeepSeek layers stay; its backend is not even imported.
Remove when: SGLang's backend takes its kernels from a registry that plugins can add to.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.sglang.sparse_mla._config import GROUP, NAMES, sparse_mla_asked

PATCH = Patch(
    id="sglang.sparse_mla.attention_backend",
    target=(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup:"
        "_build_full_attention_backend_from_str"
    ),
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=sparse_mla_asked,
    relies_on=(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        "sglang.srt.layers.radix_attention:RadixAttention.forward",
        "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool",
        "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.get_key_buffer",
        "sglang.srt.models.deepseek_common.attention_backend_handler:handle_attention_dsa",
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:"
        "DeepseekMLAForwardMixin.forward_absorb_core",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch",
        "sglang.srt.model_executor.runner.eager_runner:EagerRunner._execute_idle",
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.capture_one_shape",
    ),
    upstream="none: SGLang chooses among its own kernels",
)


@PATCH.around
def answer_with_ours(original: Any) -> Any:
    """The backend of one name: ours where it is that of sparse attention."""

    def _build_full_attention_backend_from_str(*, model_runner: Any, backend_str: str, init_new_workspace: bool) -> Any:
        if backend_str not in NAMES:
            return original(model_runner=model_runner, backend_str=backend_str, init_new_workspace=init_new_workspace)
        from atom_patches.sglang.adapters.sparse_mla.backend import SparseMlaBackend

        model_runner.init_new_workspace = init_new_workspace
        return SparseMlaBackend(model_runner)

    return _build_full_attention_backend_from_str
