"""One data-parallel rank whose engine core runs in this process; its grammars take their time.

    python dp_idle_rank.py PLAN.json RESULT.json

PLAN is a list of one engine: `model`, `options` of LLM, and `waves`, each a list of `[prompt, tokens]`; with 0
tokens the request has to wait for a grammar. RESULT holds every wave's tokens, what each of this rank's steps
scheduled and whether it ran a dummy pass then, and the patch's state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from traffic import sampling_params, save

GRAMMAR_SECONDS = 0.3
"""Many steps long, so that steps without scheduled tokens are no matter of luck."""


def slow_grammars() -> None:
    """Let every grammar come late."""
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar

    def late(self: StructuredOutputManager, *args: Any, **kwargs: Any) -> Any:
        time.sleep(GRAMMAR_SECONDS)
        return create(self, *args, **kwargs)

    StructuredOutputManager._create_grammar = late


def record_steps(engine: Any) -> list[list[int]]:
    """For every step of the engine from now on, the tokens that it executes; a dummy pass is -1."""
    executor = engine.model_executor
    steps: list[list[int]] = []
    step, execute, dummy = engine.step, executor.execute_model, executor.execute_dummy_batch

    def recorded_step() -> Any:
        steps.append([])
        return step()

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        steps[-1].append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled, *args, **kwargs)

    def execute_dummy_batch() -> None:
        steps[-1].append(-1)
        dummy()

    engine.step, executor.execute_model, executor.execute_dummy_batch = (
        recorded_step,
        execute_model,
        execute_dummy_batch,
    )
    return steps


def main() -> None:
    [plan], path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    from vllm import LLM

    from atom_patches.core.registry import REGISTRY

    slow_grammars()
    llm = LLM(model=plan["model"], dtype="float32", enforce_eager=True, seed=0, **plan["options"])
    steps = record_steps(llm.llm_engine)
    result: dict[str, Any] = {"waves": []}
    for wave in plan["waves"]:
        prompts: Any = [{"prompt_token_ids": tokens} for tokens, _ in wave]
        wanted = [
            sampling_params(
                {"max_tokens": new} if new else {"max_tokens": 4, "choice": ["ab", "cd"], "detokenize": True}
            )
            for _, new in wave
        ]
        outputs = llm.generate(prompts, wanted, use_tqdm=False)
        result["waves"].append([list(output.outputs[0].token_ids) for output in outputs])
    result["steps"] = steps
    result["state"] = next(one.state for one in REGISTRY.status("vllm") if one.id == "vllm.dp_idle.post_step")
    save([result], path)
    sys.stdout.flush()
    os._exit(0)  # what is left to do may wait for a rank that has gone already


if __name__ == "__main__":
    main()
