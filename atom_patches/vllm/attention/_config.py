"""What attention on this package's kernel reads from vLLM's configuration, and what of it stays on vLLM's own.

Imports no vLLM: the parent process decides here, before there is an engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import Verdict, settings
from atom_patches.core.conditions import refusals

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "ATOM_ATTENTION"
GROUP = "vllm.attention"

DEVICES = frozenset({"cpu", "cuda"})
"""Platforms by the name of their devices; ROCm's are `cuda`, too."""

CACHES = frozenset({"auto", "float16", "bfloat16"})
"""What keys and values, or latents, may be stored as."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's variable for results that do not depend on what else runs."""


def attention_asked(config: VllmConfig) -> Verdict:
    """Whether the layers with keys and values of their own, or with latents, attend on this package's kernels."""
    if not settings.attention():
        return Verdict(False, f"{OPTION} is 0")
    if config.model_config is None:
        return Verdict(False, "the configuration names no model")
    found = refusals(unserved(config))
    if found:
        return Verdict(False, f"{OPTION} does not serve: {'; '.join(found)}", asked=True)
    where = "the CPU, slowly" if config.device_config.device_type == "cpu" else "a GPU, where it has never run"
    return Verdict(True, f"{OPTION} is 1, on {where}")


def unserved(config: VllmConfig) -> Iterator[str]:
    """A few words for each setting that is not served: what was found, and what to do."""
    yield from _layout(config)
    yield from _model(config)
    device = config.device_config.device_type
    if device not in DEVICES:
        yield f"the platform {device}: use one of {', '.join(sorted(DEVICES))}"
    chosen: Any = config.attention_config.backend
    if chosen is not None:
        yield f"--attention-backend {chosen.name}: leave one of the two out"
    cache, dtype = config.cache_config.cache_dtype, str(config.model_config.dtype).removeprefix("torch.")
    if cache not in CACHES:
        yield f"--kv-cache-dtype {cache}: use one of {', '.join(sorted(CACHES))}"
    elif cache not in ("auto", dtype) and device != "cpu":
        yield f"--kv-cache-dtype {cache} beside a model in {dtype}: use auto, as kernels for GPUs read one of them"
    if config.speculative_config is not None:
        yield f"--speculative-config (method {config.speculative_config.method}): leave it out"
    if config.kv_transfer_config is not None:
        yield "--kv-transfer-config: leave it out"
    if os.environ.get(BATCH_INVARIANT, "0") != "0":
        yield f"{BATCH_INVARIANT}: unset it, because the kernel cuts its work by the number of rows"


def _latents(model: Any) -> Iterator[str]:
    if hasattr(model.hf_text_config, "index_topk"):
        yield "attention to selected latents: leave it to vLLM"
    if hasattr(model.hf_text_config, "compress_ratios"):
        yield "attention to compressed latents: leave it to vLLM"
    if model.is_hybrid:
        yield "attention to latents beside recurrent layers: leave it to vLLM"


def _layout(config: VllmConfig) -> Iterator[str]:
    parallel: Any = config.parallel_config
    for option, size in (
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
    ):
        if size != 1:
            yield f"{option} {size}: leave it at 1"
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield "micro-batches (--enable-dbo, --ubatch-size): leave them out"


def _model(config: VllmConfig) -> Iterator[str]:
    model: Any = config.model_config
    text = model.hf_text_config
    if model.use_mla:
        yield from _latents(model)
    if model.runner_type != "generate":
        yield f"--runner {model.runner_type}: use generate"
    if model.is_encoder_decoder:
        yield "an encoder beside the decoder: leave it to vLLM"
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        yield "biases by distance (ALiBi): leave it to vLLM"
    if getattr(text, "attention_chunk_size", None):
        yield f"attention within chunks of {text.attention_chunk_size} tokens: leave it to vLLM"
