"""Rows do not meet over data-parallel engines before they meet over an engine's own ranks.

Why:         vLLM gathers rows for its plain experts over engines first, then over prefill-context-parallel ranks, and
             scatters the sums in that order too instead of the reverse, so no sizes fit. Besides, the second exchange
             would have to be the same one in all engines, of which one splits its step and another does not.
How:         have the outer exchange leave the engines out; `dp_exchange` makes up for it next to the experts, where
             vLLM's modular kernels have that exchange anyway.
Remove when: vLLM exchanges rows over engines inside of the exchange over prefill-context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_data_parallel_spread_experts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

PATCH = Patch(
    id="vllm.pcp.dp_naive",
    target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.do_naive_dispatch_combine",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_data_parallel_spread_experts,
    relies_on=(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_dispatch",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._maybe_combine",
    ),
    upstream="none: vLLM does not combine data and prefill context parallelism of experts",
    changes_graph=True,
)


@PATCH.around
def leave_engines_out(original: Callable[[MoERunner], bool]) -> Callable[[MoERunner], bool]:
    """Whether the outer exchange of rows includes the data-parallel engines."""

    def do_naive_dispatch_combine(self: MoERunner) -> bool:
        return self.moe_config.pcp_size == 1 and original(self)

    return do_naive_dispatch_combine
