"""Start engines one after the other on one rank of a data-parallel launch, and send each the traffic of its own.

    python dp_traffic.py PLAN.json RESULT.json

PLAN and RESULT are like those of traffic.py, but every data-parallel engine has waves of its own; a wave may be empty.
RESULT also holds how each forward pass of each wave ran, as this rank's engine told the others, if it did.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from traffic import BEGINS, answer, engine_prompt, sampling_params, save, shut_down

Passes = list[str]


def record_passes() -> Passes:
    """How forward passes run from now on: split, replicated or dummy. Patches must not be applied yet."""
    from atom_patches.vllm.adapters import pcp_data_parallel
    from atom_patches.vllm.adapters.pcp_step import SplitStep

    passes: Passes = []
    inner = pcp_data_parallel.expert_rows

    def expert_rows(metadata: Any, *args: Any) -> int:
        passes.append("split" if isinstance(metadata, SplitStep) else "dummy" if metadata is None else "replicated")
        return inner(metadata, *args)

    pcp_data_parallel.expert_rows = expert_rows
    return passes


def send(engine: Any, wave: list[dict[str, Any]], name: str) -> list[dict[str, Any] | None]:
    """Add and abort requests at their steps until all engines are done; an engine without work runs dummy passes."""
    done: dict[str, Any] = {}
    last_event = max([max(r["at"], r["abort_at"] or 0) for r in wave], default=-1)
    for step in range(2000):
        for index, request in enumerate(wave):
            if request["at"] == step:
                sampling = sampling_params(request["sampling"])
                engine.add_request(f"{name}-{index}", engine_prompt(request), sampling)
            if request["abort_at"] == step:
                engine.abort_request([f"{name}-{index}"])
        busy = engine.output_processor.has_unfinished_requests()
        if not engine.has_unfinished_requests_dp(busy or step < last_event):
            return [done.get(f"{name}-{index}") for index in range(len(wave))]
        engine.should_execute_dummy_batch = not busy
        done |= {output.request_id: answer(output) for output in engine.step() if output.finished}
    raise TimeoutError(f"wave {name} does not end; finished are {sorted(done)}")


def run(plan: dict[str, Any], passes: Passes) -> dict[str, Any]:
    """Start one engine, send it every wave, shut it down."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from atom_patches.core.registry import REGISTRY

    os.environ.update(plan["env"])
    setup = importlib.import_module(plan["setup"]) if plan.get("setup") else None
    if setup is not None:
        setup.install()
    llm = LLM(model=plan["model"], seed=0, **{"dtype": "float32", "enforce_eager": True, **plan["options"]})
    try:
        result: dict[str, Any] = {"waves": [], "passes": []}
        for index, wave in enumerate(plan["waves"]):
            passes.clear()
            result["waves"].append(send(llm.llm_engine, wave, f"wave{index}"))
            result["passes"].append(list(passes))
        if setup is not None:
            result["report"] = setup.report()
        result["patches"] = {one.id: one.state for one in REGISTRY.status("vllm")}
        shut_down(llm)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return result


def main() -> None:
    plans, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    passes = record_passes()
    results = []
    for plan in plans:
        outer = dict(os.environ)
        print(BEGINS, flush=True)
        results.append(run(plan, passes))
        os.environ.clear()
        os.environ.update(outer)
        save(results, path)
    # What is left to do at exit is the engine's own, and may wait for a rank that has gone already.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
