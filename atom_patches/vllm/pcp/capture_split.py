"""Prefill graphs exist twice where experts are spread over the ranks: of a step that is split, and of one that is not.

Why:         vLLM captures a prefill graph a size. In a replicated step the ranks' experts add up; in a split step they
             exchange rows, and either is frozen into a graph when it is captured.
How:         after each piecewise capture, capture the split step's graphs under a key of their own. The passes before
             a capture, which tune and allocate, run what is captured. vLLM's estimate of the graphs' memory goes
             through the same method, so it counts both.
Remove when: vLLM splits the prefill of the architectures in `_config.py` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_spread_experts

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PATCH = Patch(
    id="vllm.pcp.capture_split",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._warmup_and_capture",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_spread_experts,
    relies_on=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._capture_cudagraphs",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess",
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch",
        "vllm.compilation.cuda_graph:CUDAGraphWrapper.__call__",
        "vllm.forward_context:BatchDescriptor",
    ),
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def capture_both(original: Callable[..., None]) -> Callable[..., None]:
    """Capture a size's graphs, and those of a split step of that size."""
    from vllm.config import CUDAGraphMode

    from atom_patches.vllm.adapters.pcp_graphs import capture_split_rows, capturing_whole_rows

    def _warmup_and_capture(
        self: GPUModelRunner,
        desc: BatchDescriptor,
        cudagraph_runtime_mode: CUDAGraphMode,
        profile_seq_lens: int | None = None,
        allow_microbatching: bool = False,
        num_warmups: int | None = None,
    ) -> Any:
        with capturing_whole_rows():
            original(self, desc, cudagraph_runtime_mode, profile_seq_lens, allow_microbatching, num_warmups)
        ranks = self.parallel_config.prefill_context_parallel_size
        if ranks > 1 and cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            warmups = self.compilation_config.cudagraph_num_of_warmups if num_warmups is None else num_warmups
            capture_split_rows(self, desc, warmups)

    return _warmup_and_capture
