"""Add up partial rows and return different numbers of them to each data-parallel rank on the CPU.

Why:         MoE layers exchange rows over data-parallel ranks with it, and the CPU communicator does not define it.
How:         torch.distributed over the communicator's own process group.
Remove when: every release in `supports` defines it on CpuCommunicator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_patches.core import Patch
from atom_patches.vllm.cpu._conditions import data_parallel_moe

PATCH = Patch(
    id="vllm.cpu.reduce_scatterv",
    target="vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.reduce_scatterv",
    supports="vllm>=0.20.2,<0.34",
    kind="correctness",
    group="vllm.cpu_dp_moe",
    when=data_parallel_moe,
    relies_on=("vllm.distributed.device_communicators.all2all:AgRsAll2AllManager.combine",),
    upstream="no upstream change known",
    changes_graph=True,
)


@PATCH.around
def _reduce_scatterv(original: Callable[..., Any]) -> Callable[..., Any]:
    from atom_patches.vllm.adapters import ragged_collectives

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        return ragged_collectives.reduce_scatterv(self.device_group, input_, dim, sizes)

    return reduce_scatterv
