"""What prefill context parallelism reads from, and refuses in, vLLM's configuration.

Imports neither torch nor vLLM: the parent process decides here before an engine exists.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import PatchError, Verdict
from atom_patches.vllm.adapters.pcp_experts import expert_mode, unserved_experts
from atom_patches.vllm.pcp._recurrence import unserved_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "--prefill-context-parallel-size"

HYBRIDS = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Architectures of GatedDeltaNet and full-attention layers that are tested under PCP."""

DENSE = frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM"})
"""Architectures of full-attention layers only that are tested under PCP."""

BACKENDS = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"})
"""Attention backends whose cache write this group wraps."""

UNQUANTISED = frozenset({"auto", "bfloat16", "float16"})
"""Types of the KV cache that keep keys and values as they are."""


def pcp_enabled(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism.

    Raises:
        PatchError: it does, together with an option that is not served under it.
    """
    size = config.parallel_config.prefill_context_parallel_size
    if size == 1:
        return Verdict(False, f"{OPTION} is 1")
    found = list(unserved(config))
    if found:
        reasons = "\n".join(f"  - {reason}" for reason in found)
        raise PatchError(f"{OPTION} {size} cannot be served with this configuration:\n{reasons}")
    return Verdict(True, f"{OPTION} is {size}")


def pcp_with_experts(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism of a mixture of experts."""
    verdict = pcp_enabled(config)
    if verdict.ok and not config.model_config.is_moe:
        return Verdict(False, "the model has no experts")
    return verdict


def pcp_with_spread_experts(config: VllmConfig) -> Verdict:
    """Whether, besides, experts are spread over the prefill-context-parallel ranks, so that rows meet there."""
    verdict = pcp_with_experts(config)
    if verdict.ok and expert_mode(config) == "replicate":
        return Verdict(False, "every rank holds all experts (ATOM_PCP_MOE)")
    return verdict


def pcp_with_replicated_experts(config: VllmConfig) -> Verdict:
    """Whether, besides, every prefill-context-parallel rank holds all experts."""
    verdict = pcp_with_experts(config)
    if verdict.ok and (mode := expert_mode(config)) != "replicate":
        return Verdict(False, f"experts are spread over the ranks (ATOM_PCP_MOE is {mode})")
    return verdict


def pcp_with_recurrence(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism of a model with GatedDeltaNet layers."""
    verdict = pcp_enabled(config)
    if verdict.ok and not config.model_config.is_hybrid:
        return Verdict(False, "the model has no recurrent layers")
    return verdict


def without_pcp(config: VllmConfig) -> VllmConfig:
    """The configuration as the KV-cache layer has to see it.

    Every rank keeps the whole KV cache and recurrent state, so block sizes, memory and block tables are those
    of an engine without prefill context parallelism. Process groups go on to see the real size.
    """
    seen = copy.copy(config)
    seen.parallel_config = copy.copy(config.parallel_config)
    seen.parallel_config.prefill_context_parallel_size = 1
    return seen


def unserved(config: VllmConfig) -> Iterator[str]:
    """One line for each option that cannot be served together with prefill context parallelism."""
    yield from _unserved_model(config)
    yield from _unserved_parallelism(config)
    yield from _unserved_features(config)


def _unserved_model(config: VllmConfig) -> Iterator[str]:
    model: Any = config.model_config
    architecture = model.architecture
    served = HYBRIDS | DENSE
    if architecture not in served:
        yield f"--model has the architecture {architecture}; served are {', '.join(sorted(served))}"
    if model.runner_type != "generate":
        yield f"--runner is {model.runner_type}; only generate is served"
    if model.get_sliding_window() is not None:
        yield f"--model has a sliding window of {model.get_sliding_window()} tokens; only full attention is served"
    multimodal = model.multimodal_config
    if multimodal is not None and not multimodal.language_model_only:
        yield "--model takes images or video; pass --language-model-only to serve its text model"
    if model.enable_prompt_embeds:
        yield "--enable-prompt-embeds is on; prompts must be text or token ids"
    if model.quantization is not None:
        yield f"--quantization is {model.quantization}; only unquantised checkpoints are served"
    if not model.enforce_eager:
        yield "compilation and CUDA graphs are on; pass --enforce-eager"
    if model.enable_sleep_mode:
        yield "--enable-sleep-mode is on; turn it off"
    if model.enable_return_routed_experts:
        yield "--enable-return-routed-experts is on; turn it off"


def _unserved_parallelism(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    device = config.device_config.device_type
    if device != "cpu":
        yield f"the platform is {device}; only the CPU platform is served"
    for option, size in (
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
    ):
        if size != 1:
            yield f"{option} is {size}; it must be 1"
    if parallel.enable_dbo:
        yield "--enable-dbo is on; turn it off"
    if parallel.ubatch_size > 1:
        yield f"--ubatch-size is {parallel.ubatch_size}; micro-batches are not served"
    if parallel.enable_eplb:
        yield "--enable-eplb is on; turn it off"
    if parallel.enable_elastic_ep:
        yield "--enable-elastic-ep is on; turn it off"
    backend = parallel.distributed_executor_backend
    if backend not in (None, "mp", "external_launcher"):
        yield f"--distributed-executor-backend is {backend}; served are mp and external_launcher"
    if parallel.nnodes != 1:
        yield f"--nnodes is {parallel.nnodes}; one node is served"
    yield from unserved_experts(config)
    yield from unserved_heads(config)


def _unserved_features(config: VllmConfig) -> Iterator[str]:
    if config.speculative_config is not None:
        yield "--speculative-config is set; speculative decoding is not served"
    if config.lora_config is not None:
        yield "--enable-lora is on; turn it off"
    if config.kv_transfer_config is not None:
        yield "--kv-transfer-config is set; KV connectors and offload are not served"
    if config.ec_transfer_config is not None:
        yield "--ec-transfer-config is set; encoder-cache connectors are not served"
    cache: Any = config.cache_config
    if cache.cache_dtype not in UNQUANTISED:
        yield f"--kv-cache-dtype is {cache.cache_dtype}; served are {', '.join(sorted(UNQUANTISED))}"
    if cache.kv_offloading_size is not None:
        yield "--kv-offloading-size is set; KV offload is not served"
    if config.offload_config.uva.cpu_offload_gb or config.offload_config.prefetch.offload_group_size:
        yield "--cpu-offload-gb or --offload-group-size is set; weight offload is not served"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill is on; turn it off"
    if config.weight_transfer_config is not None:
        yield "--weight-transfer-config is set; weights cannot be replaced while serving"
    backend = config.attention_config.backend
    if backend is not None and backend.name not in BACKENDS:
        yield f"--attention-backend is {backend.name}; served are {', '.join(sorted(BACKENDS))}"
    if config.compilation_config.pass_config.enable_sp:
        yield "sequence parallelism (pass_config.enable_sp) is on; turn it off"
