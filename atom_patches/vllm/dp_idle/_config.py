"""In which launches a data-parallel rank's step may end without a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom_patches.core import Verdict

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_in_process(config: VllmConfig) -> Verdict:
    """Data-parallel ranks share experts, and each runs its engine core in the process that calls it."""
    parallel = config.parallel_config
    size = parallel.data_parallel_size
    if size == 1 or config.model_config is None or not config.model_config.is_moe:
        return Verdict(False, "no experts shared by data-parallel ranks: needs an MoE model and data parallelism")
    if parallel.distributed_executor_backend == "external_launcher":
        return Verdict(False, "under the external launcher vLLM's model runner runs the dummy pass")
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return Verdict(False, "the loop of an engine core in a process of its own runs the dummy pass")
    return Verdict(True, f"data_parallel_size={size}, and VLLM_ENABLE_V1_MULTIPROCESSING=0")
