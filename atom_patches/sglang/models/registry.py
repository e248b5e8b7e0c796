"""The ATOM decoders run the models that they serve, in place of SGLang's own.

Why:         SGLang's registry maps an architecture to the class in its own package; its one variable replaces whole
             packages, says nothing when a class fails to import, and then serves a fallback.
How:         where a checkpoint's architecture becomes a class, answer with ours for the architectures asked for.
Remove when: SGLang lets plugins register a model class for an architecture, and fails where it cannot be had.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.models.families import ARCHITECTURES
from atom_patches.sglang.models._config import GROUP, atom_models_asked

PATCH = Patch(
    id="sglang.models.registry",
    target="sglang.srt.models.registry:_ModelRegistry._try_load_model_cls",
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=atom_models_asked,
    relies_on=(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.post_forward_mlp_sync_batch",
        "sglang.srt.model_executor.runner.eager_runner:EagerRunner._execute_idle",
        "sglang.srt.layers.dp_attention:_DpGatheredBufferWrapper",
        "sglang.srt.layers.dp_attention:get_dp_local_info",
        "sglang.srt.layers.communicator:LayerCommunicator",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase._forward_metadata",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase._replay_metadata",
        "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend.forward_decode",
        "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend.forward_extend",
        "sglang.srt.layers.logits_processor:LogitsProcessor._get_pruned_states",
        "sglang.srt.layers.radix_attention:RadixAttention.forward",
        "sglang.srt.model_loader.loader:_get_quantization_config",
        "sglang.srt.models.qwen3_5_text:Qwen3_5ForCausalLM",
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:"
        "DeepseekMLAForwardMixin.forward_absorb_core",
    ),
    upstream="none: SGLang's plugins cannot name a class for an architecture",
)


@PATCH.around
def answer_with_ours(original: Any) -> Any:
    """The class for one architecture: ours where there is one."""

    def _try_load_model_cls(self: Any, model_arch: str) -> Any:
        if model_arch not in ARCHITECTURES:
            return original(self, model_arch)
        from atom_patches.sglang.adapters.classes import CLASSES

        return CLASSES[model_arch]

    return _try_load_model_cls
