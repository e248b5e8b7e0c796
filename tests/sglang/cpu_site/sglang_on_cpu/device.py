"""What torch and SGLang ask of a device's module, and of host memory beside a device."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

from sglang_on_cpu.after_import import replace

UTILS = "sglang.srt.utils.common"
PINNING = ("managers.overlap_utils", "managers.schedule_batch", "managers.utils", "model_executor.forward_batch_info")


class _TorchWithoutPinning:
    """What a module calls torch, but that pinned memory, which takes an accelerator, is plain memory.

    torch itself stays as it is: `with torch.device(...)` knows its functions by identity.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("tensor", "empty", "zeros"):
            return found

        def created(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            return found(*args, **options)

        return created


def _also_on_cpu(register: Any) -> Any:
    """SGLang registers its own operators for its accelerators alone."""

    @functools.wraps(register)
    def registered(op_name: str, op_func: Any, *args: Any, target_lib: Any = None, **options: Any) -> None:
        import torch

        known = hasattr(torch.ops.sglang, op_name)
        register(op_name, op_func, *args, target_lib=target_lib, **options)
        if not known:
            (target_lib or sys.modules[UTILS].sglang_lib).impl(op_name, op_func, "CPU")

    return registered


def install() -> None:
    for name in PINNING:
        replace(f"sglang.srt.{name}", "torch", _TorchWithoutPinning)
    replace("torch", "Tensor.pin_memory", lambda original: lambda tensor, device=None: tensor)
    # `with torch.cpu.device(index)`, which other devices' modules have.
    replace("torch.cpu", "device", lambda original: lambda index=None: contextlib.nullcontext())
    replace(UTILS, "direct_register_custom_op", _also_on_cpu)
    # Binds a rank to cores of its own; here ranks share few cores, one thread each.
    replace("sglang.srt.utils.numa_utils", "init_threads_binding", lambda original: lambda **ranks: [])
    # Pads heads and widths for kernels of Intel's, and leaves what it added uninitialised where those are missing.
    config = "sglang.srt.configs.update_config"
    replace(config, "adjust_config_with_unaligned_cpu_tp", lambda original: lambda model_config, *args: model_config)
    backend = "sglang.srt.layers.attention.torch_native_backend"
    name = "TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value"
    replace(backend, name, lambda original: lambda self: 1)  # DP attention pads lengths with it
