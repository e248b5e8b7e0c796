"""A step in which nothing is scheduled runs a dummy pass, as its data-parallel peers expect.

Why:         a rank whose requests all wait (for a grammar, for a transfer) schedules no tokens. The loop of an engine
             core in a process of its own then runs a dummy pass, and so does the model runner under the external
             launcher. An engine core in the caller's process has neither: the rank goes on to ask whether all are done
             while its peers wait for it in the forward pass, and all stand still.
How:         after such a step, run the engine's own dummy pass. Where a loop does it already nothing changes:
             a second pass in a step would part the ranks as well.
Remove when: every release in `supports` runs a dummy pass in InprocClient.get_output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.dp_idle._config import engine_in_process

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

PATCH = Patch(
    id="vllm.dp_idle.post_step",
    group="vllm.dp_idle",
    target="vllm.v1.engine.core:EngineCore.post_step",
    supports="vllm>=0.20.2,<0.34",
    kind="correctness",
    when=engine_in_process,
    relies_on=(
        "vllm.v1.engine.core:EngineCore.step",
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        "vllm.v1.engine.core:EngineCore.execute_dummy_batch",
        "vllm.v1.engine.core:EngineCoreProc._process_engine_step",
        "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop",
        "vllm.v1.engine.core_client:InprocClient.get_output",
        "vllm.v1.engine.llm_engine:LLMEngine.step",
        "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests_dp",
    ),
    upstream="vllm-project/vllm#43547",
)


@PATCH.around
def keep_up_with_peers(original: Callable[[EngineCore, bool], None]) -> Callable[[EngineCore, bool], None]:
    """Exactly one forward pass a step."""
    from vllm.v1.engine.core import EngineCoreProc

    def post_step(self: EngineCore, model_executed: bool) -> None:
        original(self, model_executed)
        if not model_executed and not isinstance(self, EngineCoreProc):
            self.execute_dummy_batch()

    return post_step
