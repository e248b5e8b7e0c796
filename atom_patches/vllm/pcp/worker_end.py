"""A worker that hangs does not outlive its engine.

Why:         a step that times out, since a rank hangs, ends the engine core, and vLLM's client grants it fewer seconds
             than it grants its workers. A worker that cannot act on a signal, stopped or stuck in a driver, stays, and
             keeps its device.
How:         where a worker begins to watch for its engine core's end, ask the kernel to kill it at that moment. Workers
             that an engine core ends in order have ended before.
Remove when: vLLM's client waits until the engine core has ended its workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import WorkerProc

PATCH = Patch(
    id="vllm.pcp.worker_end",
    target="vllm.v1.executor.multiproc_executor:WorkerProc.monitor_death_pipe",
    supports="vllm>=0.20.2,<0.21",
    kind="optimisation",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor._ensure_worker_termination",
    ),
    upstream="none: vLLM leaves a worker behind that does not react",
)


@PATCH.around
def end_with_engine_core(original: Callable[..., None]) -> Callable[..., None]:
    """Watch for the end of the process that started this worker."""
    import multiprocessing

    def monitor_death_pipe(self: WorkerProc, *args: Any) -> None:
        from atom_patches.vllm.adapters.parent_end import end_with_parent

        original(self, *args)
        parent = multiprocessing.parent_process()
        # The kernel means the thread that started this process: of an engine core it is the main one, of a script's own
        # engine it may be any.
        if parent is not None and parent.name.startswith("EngineCore"):
            end_with_parent()

    return monitor_death_pipe
