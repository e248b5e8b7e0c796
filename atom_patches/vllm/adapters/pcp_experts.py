"""How experts are spread over prefill-context-parallel ranks.

Imports neither torch nor vLLM: `vllm/pcp/_config.py` asks in the parent process, before an engine exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.core import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_EXPERT_TILE = 32
"""vLLM's CPU kernel for experts takes widths of a multiple of this only (0.20.2, cpu_fused_moe.cpp)."""


def expert_mode(config: VllmConfig) -> str:
    """What ATOM_PCP_MOE comes to: `shard`, `ep` or `replicate`; for a configuration that was not refused."""
    asked = settings.pcp_moe()
    if asked != "auto":
        return asked
    if config.parallel_config.enable_expert_parallel:
        return "ep"
    return "shard" if _cuts_evenly(config, _all_ranks(config)) else "replicate"


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
