"""Checks at an engine's start that need the built model and the process groups."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_pcp_group, get_world_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform

from atom_patches.core import PatchError, settings
from atom_patches.vllm.adapters.pcp_attention import writes_gathered
from atom_patches.vllm.adapters.pcp_experts import expert_mode
from atom_patches.vllm.adapters.pcp_step import logger


def check_layers(config: VllmConfig) -> None:
    """Refuse layers that a split step cannot run.

    Raises:
        PatchError: names the layer, what it is, and what is served.
    """
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():  # type: ignore[type-abstract]
        problem = _problem(layer)
        if problem is not None:
            raise PatchError(f"prefill context parallelism cannot serve layer {name}: {problem}")


def tell_unproven(config: VllmConfig) -> None:
    """Say once, in the first rank's log, how little has been compared on this platform."""
    device = config.device_config.device_type
    if device != "cpu" and get_world_group().rank_in_group == 0:
        logger.warning(
            "prefill context parallelism on %s: answers were compared with one device's for hybrids on one or two H200 "
            "only; compare yours", device
        )  # fmt: skip


def tell_one_gpu_only(config: VllmConfig) -> None:
    """Say once, in the first rank's log, that nobody has seen this run on several GPUs."""
    device = config.device_config.device_type
    if device != "cpu" and get_world_group().rank_in_group == 0:
        logger.warning(
            "prefill context parallelism on %s with this release's runner: answers were compared with one rank's for "
            "two ranks that share an H200 only, with vLLM 0.32.0; compare yours, and first-token times", device
        )  # fmt: skip


def check_link() -> None:
    """Refuse a GPU without NCCL: vLLM would leave what a reduce-scatter gives unwritten, and say nothing.

    Raises:
        PatchError: vLLM found no NCCL library, or was told not to use it.
    """
    communicator: Any = get_pcp_group().device_communicator
    nccl = getattr(communicator, "pynccl_comm", None)
    if nccl is not None and nccl.disabled:
        raise PatchError(
            "prefill context parallelism on a GPU needs NCCL, which vLLM has not: unset VLLM_DISABLE_PYNCCL, or set "
            "VLLM_NCCL_SO_PATH to the library"
        )


def check_ranks_agree(config: VllmConfig) -> None:
    """Refuse ranks whose environment, or memory, would make them plan different steps.

    Raises:
        PatchError: names the variables and both ranks' values.
    """
    own = {
        "ATOM_PCP_ATTENTION": settings.pcp_attention(),
        "ATOM_PCP_GDN": settings.pcp_gdn(),
        "ATOM_PCP_MOE": settings.pcp_moe(),
        "ATOM_PCP_MIN_ROWS": settings.pcp_min_rows(),
        # What `auto` comes to depends on the GPU's memory.
        "experts": expert_mode(config) if config.model_config.is_moe else "none",
    }
    # Tensor-parallel ranks have to split alike, too: of other kinds of ranks there are none under this option.
    world = get_world_group()
    first: Any = world.broadcast_object(own, src=0)
    if own != first:
        raise PatchError(
            f"rank {world.rank_in_group} has {own}, rank 0 has {first}; set these variables alike for all ranks"
            + ("" if own["experts"] == first["experts"] else ", and say shard or replicate in ATOM_PCP_MOE")
        )


def _problem(layer: Any) -> str | None:
    if isinstance(layer, MambaBase):
        if layer.mamba_type != "gdn_attention":
            return f"recurrent layers of type {layer.mamba_type}; served is gdn_attention"
        return None
    backend = layer.get_attn_backend()
    if backend.get_name() == "CPU_ATTN":
        return _cpu_problem()
    if not writes_gathered(layer.impl):
        return (
            f"its backend {backend.get_name()} does not write gathered keys and values; "
            "pass --attention-backend FLASH_ATTN or TRITON_ATTN"
        )
    return None


def _cpu_problem() -> str | None:
    from vllm.v1.attention.backends.cpu_attn import _CPU_ARCH_PREFER_MIXED_BATCH  # later releases have none

    architecture = current_platform.get_cpu_architecture()
    if architecture in _CPU_ARCH_PREFER_MIXED_BATCH:
        return None
    return (
        f"on the CPU architecture {architecture} prefill attends to the rows at hand instead of the paged cache; "
        f"served are {', '.join(str(a) for a in _CPU_ARCH_PREFER_MIXED_BATCH)}"
    )
