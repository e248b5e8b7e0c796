"""What prefill context parallelism reads from, and refuses in, vLLM's configuration.

Imports neither torch nor vLLM: the parent process decides here before an engine exists.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import PatchError, Verdict, source
from atom_patches.core.conditions import refusals
from atom_patches.vllm.adapters.pcp_experts import expert_mode, unserved_experts
from atom_patches.vllm.pcp._formats import unserved_formats
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

DEEPSTACK = frozenset({"Qwen3VLForConditionalGeneration"})
"""The same, whose first layers take features of pictures besides, from buffers of the model."""

BACKENDS = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"})
"""Attention backends whose cache write this group wraps."""

DEVICES = frozenset({"cpu", "cuda"})
"""Platforms by the name of their devices; ROCm's are `cuda`, too."""

COLLECTIVE_OPS = (
    "vllm::unified_attention_with_output",
    "vllm::unified_kv_cache_update",
    "vllm::gdn_attention_core",
)
"""Operations in which ranks exchange rows of one step, which no graph of many steps may hold."""

ALL2ALL = frozenset({"allgather_reducescatter", "naive"})
"""Exchanges of experts' rows over data-parallel engines that send all rows to all engines."""

UPSTREAM = "vllm.v1.worker.gpu.pcp_manager:PCPManager"
"""What later releases of vLLM have instead of this group, for models with latent attention alone."""

RAY_EXECUTOR_V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
"""vLLM's variable that chooses its newer Ray executor."""


def pcp_enabled(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism.

    Raises:
        PatchError: it does, together with an option that is not served under it.
    """
    size = config.parallel_config.prefill_context_parallel_size
    if size == 1:
        return Verdict(False, f"{OPTION} is 1")
    if source.defined(UPSTREAM).ok:
        by = "vLLM itself" if config.model_config.use_mla else "vllm.pcp_manager"
        return Verdict(False, f"served by {by}, whose model runner has a manager for it")
    found = refusals(unserved(config))
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


def pcp_with_data_parallel_experts(config: VllmConfig) -> Verdict:
    """Whether, besides, data-parallel engines share the experts."""
    verdict = pcp_with_experts(config)
    if verdict.ok and config.parallel_config.data_parallel_size == 1:
        return Verdict(False, "--data-parallel-size is 1")
    return verdict


def pcp_with_data_parallel_spread_experts(config: VllmConfig) -> Verdict:
    """Whether experts are spread over data-parallel engines and the prefill-context-parallel ranks of each."""
    verdict = pcp_with_data_parallel_experts(config)
    return pcp_with_spread_experts(config) if verdict.ok else verdict


def pcp_with_ray(config: VllmConfig) -> Verdict:
    """Whether, besides, Ray starts the workers."""
    verdict = pcp_enabled(config)
    backend = config.parallel_config.distributed_executor_backend
    if verdict.ok and backend != "ray":
        return Verdict(False, f"--distributed-executor-backend is {backend}")
    return verdict


def pcp_with_recurrence(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism of a model with GatedDeltaNet layers."""
    verdict = pcp_enabled(config)
    if verdict.ok and not config.model_config.is_hybrid:
        return Verdict(False, "the model has no recurrent layers")
    return verdict


def pcp_with_deepstack(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism of a model whose first layers see pictures."""
    verdict = pcp_enabled(config)
    if verdict.ok and config.model_config.architecture not in DEEPSTACK:
        return Verdict(False, "the model keeps no features of pictures for its layers")
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
    yield from unserved_anywhere(config)
    yield from _unserved_compilation(config)


def unserved_anywhere(config: VllmConfig) -> Iterator[str]:
    """The same without what concerns compilation only, whose options differ between the releases."""
    yield from _unserved_model(config)
    yield from _unserved_parallelism(config)
    yield from _unserved_features(config)
    yield from unserved_formats(config)


def _unserved_model(config: VllmConfig) -> Iterator[str]:
    model: Any = config.model_config
    architecture = model.architecture
    served = HYBRIDS | DENSE | DEEPSTACK
    if architecture not in served:
        yield f"--model has the architecture {architecture}; served are {', '.join(sorted(served))}"
    if architecture in DEEPSTACK and not model.enforce_eager:
        yield f"--model has the architecture {architecture}, which is served without compilation; pass --enforce-eager"
    if model.runner_type != "generate":
        yield f"--runner is {model.runner_type}; only generate is served"
    if model.get_sliding_window() is not None:
        yield f"--model has a sliding window of {model.get_sliding_window()} tokens; only full attention is served"
    if config.device_config.device_type == "cpu" and not model.enforce_eager:
        yield "compilation is on, and the CPU platform's is not served; pass --enforce-eager"
    if model.enable_sleep_mode:
        yield "--enable-sleep-mode is on; turn it off"
    if getattr(model, "enable_return_routed_experts", False):  # later releases refuse it themselves
        yield "--enable-return-routed-experts is on; turn it off"


def _unserved_parallelism(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    device = config.device_config.device_type
    if device not in DEVICES:
        yield f"the platform is {device}; served are {', '.join(sorted(DEVICES))}"
    for option, size in (
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
    if backend not in (None, "mp", "ray", "external_launcher"):
        yield f"--distributed-executor-backend is {backend}; served are mp, ray and external_launcher"
    if backend == "ray" and os.environ.get(RAY_EXECUTOR_V2, "0") != "1":
        yield (
            "--distributed-executor-backend is ray, whose older executor gives work to tensor- and pipeline-parallel "
            f"ranks only; set {RAY_EXECUTOR_V2}=1"
        )
    if parallel.data_parallel_size > 1 and "ray" in (backend, parallel.data_parallel_backend):
        yield f"--data-parallel-size is {parallel.data_parallel_size}, and Ray starts engines or workers; leave one out"
    if parallel.nnodes != 1:
        yield f"--nnodes is {parallel.nnodes}; one node is served"
    yield from unserved_experts(config)
    yield from unserved_heads(config)
    # Engines without experts do not know of each other.
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        yield from _unserved_data_parallel_experts(config)


def _unserved_data_parallel_experts(config: VllmConfig) -> Iterator[str]:
    parallel: Any = config.parallel_config
    option = f"--data-parallel-size is {parallel.data_parallel_size}, and the model has experts"
    device = config.device_config.device_type
    if device != "cpu":
        yield f"{option}, which is served on the CPU platform only, not on {device}; leave that option out"
    if not config.model_config.enforce_eager:
        yield f"{option}, which is not served with compilation and CUDA graphs; pass --enforce-eager"
    if parallel.use_sequence_parallel_moe:
        yield (
            f"{option}, --tensor-parallel-size is {parallel.tensor_parallel_size}, and --enable-expert-parallel is on, "
            "so vLLM cuts rows over tensor-parallel ranks; leave one of the three options out"
        )
    if parallel.all2all_backend not in ALL2ALL:
        yield f"--all2all-backend is {parallel.all2all_backend}; served are {', '.join(sorted(ALL2ALL))}"


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
    if getattr(cache, "calculate_kv_scales", False):  # later releases have no such option
        yield "--calculate-kv-scales is on; each rank would find scales of its own rows, turn it off"


def _unserved_compilation(config: VllmConfig) -> Iterator[str]:
    compilation: Any = config.compilation_config
    if compilation.pass_config.enable_sp:
        yield "sequence parallelism (pass_config.enable_sp) is on; turn it off"
    if compilation.pass_config.fuse_rope_kvcache:
        yield "pass_config.fuse_rope_kvcache is on, whose cache write takes the rows at hand only; turn it off"
    if not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        return
    if compilation.use_inductor_graph_partition:
        yield "use_inductor_graph_partition is on in --compilation-config; turn it off"
    within = [op for op in COLLECTIVE_OPS if op not in (compilation.splitting_ops or ())]
    if within:
        yield (
            f"splitting_ops in --compilation-config lack {', '.join(within)}, which would be captured in graphs; "
            "leave splitting_ops out, or set cudagraph_mode to FULL_DECODE_ONLY"
        )
