"""Let vLLM's CPU platform, which knows nothing of Ray, take what Ray counts as GPUs; for every process on this path."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

if importlib.util.find_spec("wrapt") and os.environ.get("RAY_ON_CPU"):
    import wrapt

    @wrapt.when_imported("vllm.platforms.cpu")
    def take_gpus(module: Any) -> None:
        """Name the kind of device that Ray hands out, and leave memory nodes alone, which its numbers would choose."""
        module.CpuPlatform.ray_device_key = "GPU"
        module.CpuPlatform.device_control_env_var = "RAY_ON_CPU_DEVICES"
