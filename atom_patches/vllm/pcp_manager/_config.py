"""When this group serves prefill context parallelism, and what it refuses besides what `vllm.pcp` refuses.

Imports neither torch nor vLLM: the parent process decides here before an engine exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import PatchError, Verdict, settings, source
from atom_patches.core.conditions import refusals
from atom_patches.vllm.pcp._config import OPTION, UPSTREAM, unserved_anywhere

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MANAGER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.pcp_manager_cls"
"""Where a release's model runner says which manager it takes."""

MODELS = frozenset({"Qwen3ForCausalLM", "Qwen3_5ForConditionalGeneration"})
"""Architectures that are tested with it: full attention, and a hybrid without experts."""

HYBRID_DEVICES = frozenset({"cuda"})
"""Platforms whose recurrent layers call the core that this group wraps."""


def managed_pcp(config: VllmConfig) -> Verdict:
    """Whether the configuration asks for prefill context parallelism of a model without latent attention, on a release
    whose runner has a manager for it.

    Raises:
        PatchError: it does, together with an option that is not served under it.
    """
    size = config.parallel_config.prefill_context_parallel_size
    if size == 1:
        return Verdict(False, f"{OPTION} is 1")
    if config.model_config.use_mla:
        return Verdict(False, "the model has latent attention")
    if not source.defined(UPSTREAM).ok:
        return Verdict(False, "this vLLM has no manager for it; vllm.pcp serves it")
    found = refusals(_unserved(config))
    if found:
        reasons = "\n".join(f"  - {reason}" for reason in found)
        raise PatchError(f"{OPTION} {size} cannot be served with this configuration:\n{reasons}")
    return Verdict(True, f"{OPTION} is {size}")


def managed_pcp_with_recurrence(config: VllmConfig) -> Verdict:
    """Whether, besides, the model has GatedDeltaNet layers."""
    verdict = managed_pcp(config)
    if verdict.ok and not config.model_config.is_hybrid:
        return Verdict(False, "the model has no recurrent layers")
    return verdict


def _unserved(config: VllmConfig) -> Iterator[str]:
    """One line for each option that cannot be served."""
    yield from unserved_anywhere(config)
    model: Any = config.model_config
    parallel: Any = config.parallel_config
    cache: Any = config.cache_config
    runner: Any = config
    if not runner.use_v2_model_runner:
        yield "vLLM takes its first model runner, which refuses it; unset VLLM_USE_V2_MODEL_RUNNER, and see its log"
    if not model.enforce_eager:
        yield "compilation and CUDA graphs are on, which were never run with it; pass --enforce-eager"
    if model.architecture not in MODELS:
        yield (
            f"--model has the architecture {model.architecture}; on this release {' and '.join(sorted(MODELS))} ran; "
            "for others take vLLM 0.20.2"
        )
    if model.is_hybrid and (device := config.device_config.device_type) not in HYBRID_DEVICES:
        yield f"--model has recurrent layers, whose kernels of the platform {device} never ran with it"
    if model.is_hybrid and cache.enable_prefix_caching:
        yield "prefix caching is on, which never ran with it and a hybrid; pass --no-enable-prefix-caching"
    if model.is_hybrid and settings.pcp_attention() == "zigzag":
        yield "ATOM_PCP_ATTENTION is zigzag, and hybrids attend in contiguous slices on this release; unset it"
    if parallel.tensor_parallel_size > 1:
        yield f"--tensor-parallel-size is {parallel.tensor_parallel_size}; it must be 1"
    if parallel.data_parallel_size > 1:
        yield f"--data-parallel-size is {parallel.data_parallel_size}; it must be 1"
    if parallel.distributed_executor_backend == "ray":
        yield "--distributed-executor-backend is ray; take mp"
    if model.multimodal_config is not None and not model.multimodal_config.language_model_only:
        yield "--model takes pictures; pass --language-model-only"
    if model.enable_prompt_embeds:
        yield "--enable-prompt-embeds is on; turn it off"
