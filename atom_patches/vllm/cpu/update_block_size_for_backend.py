"""Give attention and recurrent state pages of equal size on the CPU platform.

Why:         the CPU platform skips the alignment that the other platforms do for hybrid models, so the page sizes of
             their two kinds of cache differ and no KV-cache layout is found.
How:         run upstream's own alignment after the platform's choice of a block size.
Remove when: every release in `supports` aligns hybrid models on the CPU platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import gated_delta_net, upstream_runs_it

PATCH = Patch(
    id="vllm.cpu.update_block_size_for_backend",
    target="vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.cpu_gdn",
    when=gated_delta_net,
    upstreamed=upstream_runs_it,
    relies_on=(
        "vllm.platforms.interface:Platform._find_non_ssm_backend",
        "vllm.platforms.interface:Platform._align_hybrid_block_size",
        "vllm.platforms.interface:Platform.update_block_size_for_backend",
    ),
    upstream="vllm-project/vllm#41025",
)


@PATCH.around
def _update_block_size_for_backend(original: Callable[..., None]) -> Callable[..., None]:
    def update_block_size_for_backend(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        model = vllm_config.model_config
        if model is None or not model.is_hybrid:
            return
        backend = cls._find_non_ssm_backend(vllm_config)
        if backend is not None:
            cls._align_hybrid_block_size(vllm_config, backend)

    return update_block_size_for_backend
