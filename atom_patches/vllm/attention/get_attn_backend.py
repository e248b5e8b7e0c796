"""Layers with keys and values of their own, and those with latents, attend on this package's kernels.

Why:         `paged_attention` and `mla_attention` have bindings to AITER and kernels in Triton; vLLM takes other
             backends by the names it knows, and on some platforms none but its own. On the CPU it has none for latents.
How:         where vLLM chooses a layer's backend, give ours for what it serves: causal attention of a decoder, without
             sinks, to all latents or all keys. All else is left to vLLM's choice.
Remove when: vLLM's list of backends takes a plugin's by name on every platform.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.attention._config import GROUP, OPTION, attention_asked

PATCH = Patch(
    id="vllm.attention.get_attn_backend",
    target="vllm.v1.attention.selector:get_attn_backend",
    supports="vllm>=0.20.2,<0.21",
    kind="optimisation",
    group=GROUP,
    when=attention_asked,
    relies_on=(
        "vllm.v1.attention.backend:AttentionBackend",
        "vllm.v1.attention.backend:AttentionImpl",
        "vllm.v1.attention.backend:AttentionMetadataBuilder",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
        "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
        "vllm.model_executor.layers.attention.mla_attention:unified_mla_kv_cache_update",
        "vllm.model_executor.layers.attention.mla_attention:get_mla_dims",
        "vllm.model_executor.layers.attention.mla_attention:"
        "MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size",
        "vllm.v1.attention.backend:MLAAttentionImpl",
        "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
    ),
    upstream="none: a plugin registers its backend as CUSTOM, which not every platform takes",
    changes_graph=True,
    graph_settings=(OPTION,),
)


@PATCH.around
def get_attn_backend(original: Any) -> Any:
    """Choose our backend for what it serves."""
    import inspect

    signature = inspect.signature(original)

    def get_attn_backend(*args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config

        from atom_patches.vllm.adapters.latent_attention import AtomLatentBackend
        from atom_patches.vllm.adapters.paged_attention import AtomPagedBackend

        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        if attention_asked(get_current_vllm_config()).ok:
            for backend in (AtomPagedBackend, AtomLatentBackend):
                if backend.serves(asked.arguments):
                    return backend
        return original(*args, **kwargs)

    return get_attn_backend
