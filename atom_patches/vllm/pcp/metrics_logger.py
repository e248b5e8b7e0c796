"""The figures of prefill context parallelism appear among vLLM's metrics.

Why:         vLLM's loggers know the statistics that they were written for.
How:         give the manager of an engine's loggers one more; the metrics are in the registry that `/metrics` shows.
Remove when: vLLM reports its context parallelism itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerManager

PATCH = Patch(
    id="vllm.pcp.metrics_logger",
    target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    supports="vllm>=0.20.2,<0.21",
    kind="optimisation",
    group="vllm.pcp_metrics",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        "vllm.v1.metrics.loggers:PrometheusStatLogger.record",
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
        "vllm.v1.metrics.prometheus:unregister_vllm_metrics",
    ),
    upstream="none: vLLM has no metrics of context parallelism",
)


@PATCH.around
def add_logger(original: Callable[..., None]) -> Callable[..., None]:
    """Make the loggers, the last of which counts what the split did."""
    from atom_patches.vllm.adapters.pcp_metrics import PcpStatLogger

    def __init__(self: StatLoggerManager, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        # vLLM's own Prometheus logger takes every metric of vLLM out of the registry first, ours included.
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            self.stat_loggers.append(PcpStatLogger(vllm_config, self.engine_indexes))

    return __init__
