"""What the ATOM decoders read from vLLM's configuration, and what of it they leave to vLLM's own models.

Imports no vLLM, and a family's file only to read a checkpoint: the parent process decides here, before there is an
engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from atom_patches.core import Verdict
from atom_patches.models import families, quantised
from atom_patches.models.choice import decoder_asked
from atom_patches.models.quantised import Served

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GROUP = "vllm.models"

SERVED = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Architectures, as checkpoints name them, for which there is a class here."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's variable for results that do not depend on what else runs."""

NO_LATENTS = "VLLM_MLA_DISABLE"
"""vLLM's variable for a cache of every head's keys and values instead of latents."""

HYBRIDS = frozenset({"qwen3_next", "qwen3_5"})
"""Families with GatedDeltaNet layers."""

DEVICES = frozenset({"cpu", "cuda"})
"""Platforms by the name of their devices; ROCm's are `cuda`, too."""

LATENTS = frozenset({"deepseek_v3", "deepseek_v32"})
"""Families with attention to latents."""

QUANTISED = {
    quantised.FP8_BLOCKS: Served(frozenset({"fp8"})),
    quantised.INT8: Served(frozenset({"compressed-tensors"}), experts=False),
    quantised.GPTQ: Served(frozenset({"gptq_marlin"}), experts=False, recurrent=False),
    quantised.AWQ: Served(frozenset({"cpu_awq"}), experts=False, recurrent=False),
}
"""Formats of weights that vLLM's layers run for an ATOM decoder."""

OWN_NAMES = frozenset({"sharded_state", "runai_streamer_sharded", "tensorizer"})
"""Formats of weights that may carry the names of vLLM's own model instead of the published ones."""


def atom_models_asked(config: VllmConfig) -> Verdict:
    """Whether the configuration's model runs on an ATOM decoder.

    Raises:
        PatchError: --model-impl atom, and it cannot.
    """
    model = config.model_config
    if model is None:
        return Verdict(False, "the configuration names no model")
    return decoder_asked(
        "vLLM", str(model.model_impl), lambda: str(model.architecture), partial(unserved, config), SERVED
    )


def unserved(config: VllmConfig, family: str) -> Iterator[str]:
    """A few words for each setting that the ATOM decoder does not serve: what was found, and what to do."""
    yield from _platform(config)
    yield from _layout(config, family)
    yield from _features(config)
    if family in LATENTS and not config.model_config.use_mla:
        yield f"{NO_LATENTS}: unset it"
    reason = families.refusal(family, config.model_config.hf_text_config)
    if reason is None:
        reason = _quantisation(config.model_config, family)
    if reason is not None:
        yield reason


def _quantisation(model: Any, family: str) -> str | None:
    if model.quantization is None:
        return None
    decoder = families.read(family, model.hf_text_config)
    return quantised.refusal(str(model.quantization), model.hf_config, decoder, QUANTISED)


def _platform(config: VllmConfig) -> Iterator[str]:
    device = config.device_config.device_type
    if device not in DEVICES:
        yield f"the platform {device}: use one of {', '.join(sorted(DEVICES))}"


def _layout(config: VllmConfig, family: str) -> Iterator[str]:
    parallel: Any = config.parallel_config
    if parallel.decode_context_parallel_size != 1:
        yield f"--decode-context-parallel-size {parallel.decode_context_parallel_size}: leave it at 1"
    if parallel.enable_eplb:
        yield "--enable-eplb: leave it out"
    if parallel.enable_elastic_ep:
        yield "--enable-elastic-ep: leave it out"
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield "micro-batches (--enable-dbo, --ubatch-size): leave them out"
    if parallel.use_sequence_parallel_moe:
        yield "--enable-expert-parallel with data and tensor parallelism, which cuts rows: leave one of the three out"
    heads = config.model_config.hf_text_config
    ranks = parallel.tensor_parallel_size
    if family in HYBRIDS and heads.linear_num_key_heads % ranks:
        yield f"--tensor-parallel-size {ranks}: use a divisor of the {heads.linear_num_key_heads} recurrent key heads"


def _features(config: VllmConfig) -> Iterator[str]:
    model: Any = config.model_config
    if model.runner_type != "generate" or model.convert_type != "none":
        yield f"--runner {model.runner_type}, --convert {model.convert_type}: use generate and none"
    if model.get_sliding_window() is not None:
        yield f"a sliding window of {model.get_sliding_window()} tokens: use a checkpoint with full attention"
    if config.load_config.load_format in OWN_NAMES:
        yield f"--load-format {config.load_config.load_format}: use a checkpoint as it was published"
    if model.enable_return_routed_experts:
        yield "--enable-return-routed-experts: leave it out"
    if os.environ.get(BATCH_INVARIANT, "0") != "0":
        yield f"{BATCH_INVARIANT}: unset it, because the decoder's kernels choose their tiles by the number of rows"
    if config.speculative_config is not None:
        yield f"--speculative-config (method {config.speculative_config.method}): leave it out"
    if config.lora_config is not None:
        yield "--enable-lora: leave it out"
    if config.cache_config.mamba_cache_mode == "all":
        yield "--mamba-cache-mode all: use align"
    if config.compilation_config.pass_config.enable_sp:
        yield "sequence parallelism (pass_config.enable_sp): leave it out"
    offload: Any = config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        yield "weights that are moved away (--cpu-offload-gb, --offload-group-size): leave these out"
