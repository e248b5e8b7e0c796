"""Ranks of a real SGLang that share one GPU, for tests: NCCL refuses that, gloo takes tensors of a GPU.

It takes them for what tensor and data parallelism need, not for sending between two ranks, as pipeline stages do. What
gloo does cannot be captured in a graph. Asked for by SGLANG_RANKS_ON_ONE_GPU=1.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from sglang_on_cpu import collectives
from sglang_on_cpu.after_import import replace

ASKED = "SGLANG_RANKS_ON_ONE_GPU"
STATE = "sglang.srt.distributed.parallel_state"


def _without_nccl(make: Any) -> Any:
    """SGLang has a communicator of its own with NCCL beside torch's groups."""

    @functools.wraps(make)
    def made(group: Any, *args: Any, **options: Any) -> None:
        make(group, *args, **{**options, "use_pynccl": False})

    return made


def install() -> None:
    """Wrap what decides where a rank runs and how it speaks, where that was asked for."""
    if os.environ.get(ASKED) != "1":
        return
    first = contextlib.nullcontext(0)
    replace("sglang.srt.utils.common", "maybe_reindex_device_id", lambda original: lambda gpu_id: first)
    replace(STATE, "get_default_distributed_backend", lambda original: lambda device: "gloo")
    replace(STATE, "GroupCoordinator.__init__", _without_nccl)
    collectives.install()
