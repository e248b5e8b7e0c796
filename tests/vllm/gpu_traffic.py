"""Start vLLM engines one after the other, as tests on a GPU want them, and send each its waves.

    python gpu_traffic.py PLAN.json RESULT.json

PLAN is a list of engines: `model`; `options` of LLM; `env` for this engine alone; `setups`, modules whose `install` is
called first; `counts_graphs`; `waves`, each with `requests` as traffic.py takes them, and the `env` that holds from
then on, for what workers in this process read in every step.

RESULT holds for every engine that ended what each request gave, the graphs that each worker replayed in each wave,
what each worker ran on, each patch's state in this process, and whether the patched functions are vLLM's own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.traffic import BEGINS, free_blocks, save, send, shut_down


def own_functions(prefix: str) -> dict[str, bool]:
    """Whether the target of each patch whose name begins so, where this vLLM has it and it is imported, is what vLLM
    shipped."""
    from atom_patches.core import discovery, source
    from atom_patches.vllm.engine import ENGINE

    targets = [patch.site for patch in discovery.load(ENGINE) if patch.id.startswith(prefix)]
    there = [target for target in targets if target.module in sys.modules and source.defined(str(target)).ok]
    return {str(target): _is_own(target) for target in there}


def _is_own(target: Any) -> bool:
    """No function around the target, nor the target itself, is defined outside vLLM and torch."""
    import torch
    import vllm

    value: Any = sys.modules[target.module]
    for part in target.qualname.split("."):
        value = getattr(value, part)
    homes = [Path(str(package.__file__)).parent for package in (vllm, torch)]
    if isinstance(value, property):
        value = value.fget
    while value is not None:
        if not any(Path(value.__code__.co_filename).is_relative_to(home) for home in homes):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


def ran_on(worker: Any) -> dict[str, list[str]]:
    """The modules of the classes that a worker's model runner is of, and the backends of its layers."""
    runner = worker.model_runner
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    return {"runner": [one.__module__ for one in type(runner).__mro__], "backends": sorted(backends)}


def run(engine: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, send it every wave, shut it down."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from atom_patches.core.registry import REGISTRY

    began = time.monotonic()
    for setup in engine["setups"]:
        importlib.import_module(setup).install()
    options = dict(engine["options"])
    counts = engine["counts_graphs"]
    if counts:
        options["worker_extension_cls"] = "tests.vllm.graph_probe.GraphProbe"
    llm = LLM(model=engine["model"], seed=0, disable_log_stats=False, **options)
    result: dict[str, Any] = {"waves": [], "graphs": [], "start_s": time.monotonic() - began}
    try:
        if counts:
            llm.collective_rpc("graphs_start")
        before = free_blocks(llm)
        for index, wave in enumerate(engine["waves"]):
            os.environ.update(wave["env"])
            result["waves"].append(send(llm, wave["requests"], f"wave{index}"))
            if counts:
                result["graphs"].append(llm.collective_rpc("graphs_take"))
        result["ran_on"] = llm.collective_rpc(ran_on)
        result["leaked"] = before - free_blocks(llm)
        result["patches"] = {one.id: one.state for one in REGISTRY.status("vllm")}
        result["own"] = own_functions("vllm.pcp")
        shut_down(llm)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    result["whole_s"] = time.monotonic() - began
    return result


def main() -> None:
    plan, result = Path(sys.argv[1]), Path(sys.argv[2])
    results: list[dict[str, Any]] = []
    for engine in json.loads(plan.read_text()):
        outer = dict(os.environ)
        print(BEGINS, flush=True)
        os.environ.update(engine["env"])
        results.append(run(engine))
        os.environ.clear()
        os.environ.update(outer)
        save(results, result)
    # What is left to do at exit is the engine's own, and may wait for a rank that has gone already.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
