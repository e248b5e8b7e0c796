"""How experts are spread over prefill-context-parallel ranks.

Where nobody says, and all experts fit a GPU, each rank holds them whole. On two H200 (12 layers of Qwen3.6-35B-A3B's
shape, benchmarks/two-gpu-h200-2026-11-30.md), beside one GPU:

                                 whole     cut
    first token, 65,536 rows     1.85x     1.59x
                131,072 rows     1.92x     1.71x
    decode step, 1 request       1.04x     0.91x
                16 requests      1.13x     1.28x
    memory of experts            all       half of them

So whole experts cost some throughput of crowded decoding, but make no step much slower than on one GPU: in a later run
on other machines decode steps were 0.94 and 0.96 times as fast. On the CPU platform, which has nothing to gain, nothing
is left whole that can be cut.

Imports neither torch nor vLLM: `vllm/pcp/_config.py` asks in the parent process, before an engine exists. Only where
experts might be whole, vLLM's platform is asked for the GPU's memory, as vLLM itself does there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from atom_patches.core import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_EXPERT_TILE = 32
"""vLLM's CPU kernel for experts takes widths of a multiple of this only (0.20.2, cpu_fused_moe.cpp)."""

WHOLE_SHARE = 0.6
"""What all experts may take of the memory that vLLM may use, for `auto` to leave them whole. The rest is left to the
other weights, activations and, most of it, the KV cache."""


def expert_mode(config: VllmConfig) -> str:
    """What ATOM_PCP_MOE comes to: `shard`, `ep` or `replicate`; for a configuration that was not refused."""
    asked = settings.pcp_moe()
    if asked != "auto":
        return asked
    if config.parallel_config.enable_expert_parallel:
        return "ep"
    return "replicate" if whole_experts_fit(config) or not _cuts_evenly(config, _all_ranks(config)) else "shard"


def whole_experts_fit(config: VllmConfig) -> bool:
    """Whether each context-parallel rank's GPU takes all experts, and leaves enough for everything else."""
    if config.device_config.device_type != "cuda":
        return False
    allowed = WHOLE_SHARE * config.cache_config.gpu_memory_utilization * device_memory()
    return whole_expert_bytes(config) <= allowed


def whole_expert_bytes(config: VllmConfig) -> int:
    """Bytes of all experts' weights, gate, up and down, on one tensor-parallel rank."""
    model = config.model_config
    element = 1 if model.quantization == "fp8" else model.dtype.itemsize
    rows = expert_layers(config) * model.get_num_experts() * 3 * _width(config)
    return rows * model.get_hidden_size() * element // _other_ranks(config)


def expert_layers(config: VllmConfig) -> int:
    """Layers with experts."""
    text: Any = config.model_config.hf_text_config
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    step = getattr(text, "decoder_sparse_step", 1)
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(text.num_hidden_layers))


@cache
def device_memory() -> int:
    """Bytes of the first GPU, whoever has them now, so that every process finds the same."""
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


def whole_rule() -> Iterator[str]:
    """What `auto` goes by, and what some models come to."""
    yield "ATOM_PCP_MOE=auto, on GPUs and without --enable-expert-parallel, is replicate where"
    yield (
        f"  layers * experts * 3 * hidden * width * bytes / (tensor * data ranks) <= {WHOLE_SHARE} * "
        "--gpu-memory-utilization * the GPU's memory"
    )
    yield "and else shard, or replicate where the width cannot be cut; at 0.92 of the memory"
    for name, layers, experts in (("Qwen3.6-35B-A3B", 40, 256), ("Qwen3-Next-80B-A3B", 48, 512)):
        for dtype, element in (("bfloat16", 2), ("fp8", 1)):
            size = layers * experts * 3 * 2048 * 512 * element
            needed = round(size / WHOLE_SHARE / 0.92 / 1e9)
            yield f"  {name + ', ' + dtype:<29} {size / 1e9:6.1f} GB of experts, whole on GPUs from {needed} GB"
    yield "on two H200, of Qwen3.6-35B-A3B's shape in 12 layers, beside one: whole gave the first token of 65,536 rows"
    yield "1.85 times as fast, cut 1.59; a decode step of 1 request 1.04 and 0.91, of 16 requests 1.13 and 1.28"
    yield "whole in a later run, on other machines: first token 1.98, decode steps 0.94 and 0.96"


def experts_are_spread(config: VllmConfig) -> bool:
    """Whether the model has experts, and no rank holds all of them whole, so that rows meet at their ranks."""
    return config.model_config.is_moe and expert_mode(config) != "replicate"


def unserved_experts(config: VllmConfig) -> Iterator[str]:
    """One line for each way in which the experts cannot be spread as asked."""
    if not config.model_config.is_moe:
        return
    asked, distributed = settings.pcp_moe(), config.parallel_config.enable_expert_parallel
    if asked == "ep" and not distributed:
        yield "ATOM_PCP_MOE is ep, which needs --enable-expert-parallel; pass it, or unset ATOM_PCP_MOE"
    if asked in ("shard", "replicate") and distributed:
        yield (
            f"ATOM_PCP_MOE is {asked}, and --enable-expert-parallel deals out whole experts; "
            "leave that option out, or unset ATOM_PCP_MOE"
        )
    if not distributed:
        yield from _unserved_slices(config, asked)


def _unserved_slices(config: VllmConfig, asked: str) -> Iterator[str]:
    others = "--tensor-parallel-size"
    if config.parallel_config.data_parallel_size > 1:
        others += " times --data-parallel-size"
    if asked == "shard" and not _cuts_evenly(config, _all_ranks(config)):
        ranks = f"{_all_ranks(config)} {_slices(config)} ({others} times --prefill-context-parallel-size)"
        yield (
            f"the experts' intermediate size {_width(config)} cannot be cut into {ranks}, as ATOM_PCP_MOE=shard asks; "
            "unset it, pass --enable-expert-parallel, or other sizes"
        )
    if asked in ("auto", "replicate") and not _cuts_evenly(config, _other_ranks(config)):
        yield (
            f"the experts' intermediate size {_width(config)} cannot be cut into {_other_ranks(config)} "
            f"{_slices(config)} ({others}); pass --enable-expert-parallel, or another size"
        )


def _all_ranks(config: VllmConfig) -> int:
    """The ranks over which vLLM cuts each expert."""
    return _other_ranks(config) * config.parallel_config.prefill_context_parallel_size


def _other_ranks(config: VllmConfig) -> int:
    """The ranks over which each expert is cut anyway, without prefill context parallelism."""
    return config.parallel_config.tensor_parallel_size * config.parallel_config.data_parallel_size


def _width(config: VllmConfig) -> int:
    return getattr(config.model_config.hf_text_config, "moe_intermediate_size", None) or 0


def _multiple(config: VllmConfig) -> int:
    tile = CPU_EXPERT_TILE if config.device_config.device_type == "cpu" else 1
    return math.lcm(tile, *_scale_block(config))


def _scale_block(config: VllmConfig) -> list[int]:
    """The block of weights that shares one scale in an FP8 checkpoint; vLLM cuts experts between blocks only."""
    described: dict[str, Any] = config.model_config.model_arch_config.quantization_config or {}
    return described.get("weight_block_size") or []


def _slices(config: VllmConfig) -> str:
    multiple = _multiple(config)
    return "equal slices" if multiple == 1 else f"equal slices of a multiple of {multiple}"


def _cuts_evenly(config: VllmConfig, ranks: int) -> bool:
    return _width(config) % (ranks * _multiple(config)) == 0
