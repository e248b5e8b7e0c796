"""Shut a CPU model runner down without asking an absent accelerator to synchronise.

Why:         every shutdown synchronises torch's accelerator. A torch built for one that the machine lacks raises, so
             the worker ends with a stack trace and its memory and process groups are never released.
How:         run upstream's clean-up with torch.accelerator.synchronize replaced by nothing for its duration.
Remove when: every release in `supports` leaves the accelerator alone when it shuts a CPU model runner down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import served

PATCH = Patch(
    id="vllm.cpu.cleanup_profiling_kv_cache",
    target="vllm.v1.worker.cpu_model_runner:CPUModelRunner._cleanup_profiling_kv_cache",
    supports="vllm>=0.20.2,<0.34",
    kind="optimisation",
    group="vllm.cpu_shutdown",
    when=served,
    relies_on=("vllm.v1.worker.gpu_model_runner:GPUModelRunner.shutdown",),
    upstream="no upstream change known",
)


@PATCH.around
def _cleanup_profiling_kv_cache(original: Callable[..., None]) -> Callable[..., None]:
    from atom_patches.vllm.adapters.no_accelerator import without_synchronize

    def _cleanup_profiling_kv_cache(self: Any) -> None:
        with without_synchronize():
            original(self)

    return _cleanup_profiling_kv_cache
