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
from atom_patches.sglang.models._config import GROUP, SUPPORTS, atom_models_asked

COMMUNICATOR = ("sglang.srt.layers.communicator:LayerCommunicator",)
"""What moves rows between ranks until 0.5.17."""

BOUNDARIES = (
    "sglang.srt.arg_groups.model_override_base:resolved_view",
    "sglang.srt.layers.layer_boundary.exit:ExitPolicy",
    "sglang.srt.layers.layer_boundary.factories:append_stages",
    "sglang.srt.layers.layer_boundary.factories:declare_attn",
    "sglang.srt.layers.layer_boundary.factories:declare_ffn",
    "sglang.srt.layers.layer_boundary.factories:layer_stack",
    "sglang.srt.layers.layer_boundary.residual.add_norm:NormQuantReadout",
    "sglang.srt.layers.layer_boundary.residual.add_norm:NormReadout",
    "sglang.srt.layers.layer_boundary.residual.stream:ResidualStream",
    "sglang.srt.layers.layer_boundary.stage:StageBoundary",
    "sglang.srt.layers.linear:_resolve_linear_group",
    "sglang.srt.layers.moe.topk:TopK.bind_runner_backend",
    "sglang.srt.layers.moe.utils:resolve_shared_experts_config",
    "sglang.srt.layers.moe.utils:sum_post_experts_output",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.logical_forward_mode",
)
"""What does so later, and what came with it."""

PATCH = Patch(
    id="sglang.models.registry",
    target="sglang.srt.models.registry:_ModelRegistry.resolve_model_cls",
    supports=SUPPORTS,
    kind="correctness",
    group=GROUP,
    when=atom_models_asked,
    relies_on=(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.post_forward_mlp_sync_batch",
        "sglang.srt.model_executor.runner.eager_runner:EagerRunner._execute_idle",
        "sglang.srt.layers.dp_attention:_DpGatheredBufferWrapper",
        "sglang.srt.layers.dp_attention:get_dp_local_info",
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
    relies_on_one_of=(COMMUNICATOR, BOUNDARIES),
    upstream="none: SGLang's plugins cannot name a class for an architecture",
)


@PATCH.around
def answer_with_ours(original: Any) -> Any:
    """The class for the architecture that SGLang resolves to, and its name: ours where there is one."""

    def resolve_model_cls(self: Any, architectures: Any) -> Any:
        model_class, architecture = original(self, architectures)
        if architecture not in ARCHITECTURES:
            return model_class, architecture
        from atom_patches.sglang.adapters.classes import CLASSES

        return CLASSES[architecture], architecture

    return resolve_model_cls
