"""The block size that a hybrid engine runs with stays what it is.

Why:         an engine core in a process of its own validates its configuration once more after its caches are made,
             and the CPU platform then sets the block size back to its default. The scheduler cuts prefill chunks by
             that number, so chunks no longer end with a block, and the prefix cache keeps states under wrong blocks.
How:         after the platform's update, put back the block size of an engine that has its cache blocks.
Remove when: every release in `supports` chooses the CPU platform's block size once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_sets_block_size_once

PATCH = Patch(
    id="vllm.cpu.check_and_update_config",
    target="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
    supports="vllm>=0.20.2,<0.33",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_sets_block_size_once,
    relies_on=(
        "vllm.v1.engine.core:EngineCoreProc._perform_handshakes",
        "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    ),
    upstream="vLLM 0.33 chooses the CPU platform's block size once",
)


@PATCH.around
def _keep_block_size(original: Callable[..., None]) -> Callable[..., None]:
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        block_size = cache.block_size
        original(cls, vllm_config)
        if cache.num_gpu_blocks is not None:
            cache.block_size = block_size

    return check_and_update_config
