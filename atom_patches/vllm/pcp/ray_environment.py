"""Workers that Ray starts have the overlay from their first line on, with the driver's settings.

Why:         a Ray worker starts with its node's environment, and gets the driver's variables when its configuration is
             there already: too late for the overlay to be armed, so that this rank would run unpatched.
How:         before the executor meets Ray, add our variables, the plugin list and the master switch to the runtime
             environment, which Ray sets up before a process starts. What the user's own says goes first.
Remove when: vLLM starts Ray workers with the driver's variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_ray

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

PATCH = Patch(
    id="vllm.pcp.ray_environment",
    target="vllm.v1.executor.ray_utils:initialize_ray_cluster",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_ray,
    relies_on=(
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2._build_runtime_env",
        "vllm.v1.executor.ray_env_utils:get_driver_env_vars",
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
    ),
    upstream="none: vLLM hands variables over after a worker has started",
)

OURS = ("ATOM_PATCH", "ATOM_PCP_", "ATOM_KERNEL", "VLLM_PCP_DEBUG", "VLLM_PLUGINS")
"""What the names of variables begin with that the overlay reads in a worker."""


@PATCH.around
def arm_from_the_start(original: Callable[..., None]) -> Callable[..., None]:
    """Connect to Ray, whose processes for this engine are armed."""
    import os

    def initialize_ray_cluster(parallel_config: ParallelConfig, *args: Any, **kwargs: Any) -> None:
        if parallel_config.prefill_context_parallel_size > 1:
            asked: dict[str, Any] = dict(parallel_config.ray_runtime_env or {})
            own = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
            asked["env_vars"] = {**own, "ATOM_PATCHES": "1", **asked.get("env_vars", {})}
            parallel_config.ray_runtime_env = asked  # type: ignore[assignment]  # RuntimeEnv is a dictionary
        original(parallel_config, *args, **kwargs)

    return initialize_ray_cluster
