"""Each step's statistics say how the step was split, and what its ranks exchange.

Why:         whether prompts are split at all, and what that costs, is otherwise seen in a debug trace only.
How:         wrap what makes a step's statistics of the step's outcome, and add figures that are computed from the
             step's lengths, in the process that knows them. `metrics_logger` makes metrics of them.
Remove when: vLLM reports its context parallelism itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

PATCH = Patch(
    id="vllm.pcp.metrics_scheduler",
    target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    supports="vllm>=0.20.2,<0.21",
    kind="optimisation",
    group="vllm.pcp_metrics",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        "vllm.v1.metrics.stats:SchedulerStats",
        "vllm.v1.metrics.stats:LoRARequestStates.update_scheduler_stats",
    ),
    upstream="none: vLLM has no metrics of context parallelism",
)


@PATCH.around
def update_and_count(original: Callable[..., dict[int, EngineCoreOutputs]]) -> Callable[..., object]:
    """Update the scheduler, and add the step's figures to the statistics that it returns."""
    from weakref import WeakKeyDictionary

    from atom_patches.vllm.adapters.pcp_metrics import StepCounter

    counters: WeakKeyDictionary[Scheduler, StepCounter] = WeakKeyDictionary()

    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = original(self, scheduler_output, model_runner_output)
        told = [output.scheduler_stats for output in outputs.values() if output.scheduler_stats is not None]
        if not told or not scheduler_output.num_scheduled_tokens:
            return outputs
        if self.parallel_config.prefill_context_parallel_size > 1:
            counter = counters.get(self) or counters.setdefault(self, StepCounter(self))
            for stats in told:
                stats.running_lora_adapters |= counter.figures(scheduler_output).packed()
        return outputs

    return update_from_output
