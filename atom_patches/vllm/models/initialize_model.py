"""The ATOM decoders run the models that they serve, in place of vLLM's own.

Why:         a class that a plugin registers for an architecture replaces vLLM's for every engine of the process,
             whatever its options, and vLLM starts a process to look at the class before each launch.
How:         register ours under names of their own, and where vLLM makes the model of an engine that asks for them,
             give that class. What vLLM decides by an architecture stays as it is.
Remove when: vLLM asks plugins for the class of a configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.models._config import GROUP, atom_models_asked

PATCH = Patch(
    id="vllm.models.initialize_model",
    target="vllm.model_executor.model_loader.utils:initialize_model",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group=GROUP,
    when=atom_models_asked,
    relies_on=(
        "vllm.model_executor.model_loader.utils:configure_quant_config",
        "vllm.model_executor.models.registry:_ModelRegistry.register_model",
        "vllm.model_executor.models.registry:_ModelRegistry._try_load_model_cls",
        "vllm.model_executor.models.qwen3_5:Qwen3_5ForConditionalGeneration",
        "vllm.model_executor.layers.mamba.abstract:MambaBase",
        "vllm.model_executor.layers.mamba.gdn_linear_attn:gdn_attention_core",
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
        "vllm.model_executor.layers.fused_moe.layer:FusedMoE.forward",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.forward",
        "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:GroupedTopKRouter._compute_routing",
        "vllm.model_executor.layers.linear:RowParallelLinear.forward",
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
        "vllm.model_executor.layers.attention.attention:Attention.__init__",
        "vllm.model_executor.layers.attention.attention:Attention.forward",
        "vllm.model_executor.layers.attention.attention:get_attention_context",
        "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
        "vllm.config.compilation:CompilationConfig.set_splitting_ops_for_v1",
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.__init__",
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
        "vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope:DeepseekScalingRotaryEmbedding.forward_native",
        "vllm.model_executor.models.deepseek_v2:DeepSeekV2FusedQkvAProjLinear.__init__",
        "vllm.model_executor.models.deepseek_v2:Indexer.__init__",
        "vllm.model_executor.models.deepseek_v2:Indexer.forward",
    ),
    upstream="none: vLLM's plugins name a class for an architecture, not for a configuration",
    changes_graph=True,
    graph_settings=("ATOM_FUSIONS",),
)

CLASSES = "atom_patches.vllm.adapters.models.classes"


@PATCH.around
def initialize_model(original: Any) -> Any:
    """Make the model of our class where this engine asks for it."""

    def initialize_model(
        vllm_config: Any, *, prefix: str = "", model_class: Any = None, model_config: Any = None
    ) -> Any:
        # Not of a draft model, nor of a language model that another model is made of.
        own = model_config is None or model_config is vllm_config.model_config
        if model_class is None and not prefix and own and atom_models_asked(vllm_config).ok:
            model_class = atom_class(vllm_config.model_config.architecture)
        return original(vllm_config, prefix=prefix, model_class=model_class, model_config=model_config)

    return initialize_model


def atom_class(architecture: str) -> Any:
    """Our class for an architecture, as vLLM's registry loads it.

    Raises:
        RuntimeError: it cannot be imported; vLLM has logged why.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    name = f"Atom{architecture}"
    if name not in ModelRegistry.models:
        ModelRegistry.register_model(name, f"{CLASSES}:{name}")
    found = ModelRegistry._try_load_model_cls(name)
    if found is None:
        raise RuntimeError(f"the ATOM decoder of {architecture} cannot be imported; the log has the reason")
    return found
