"""Start vLLM engines one after the other and send each the traffic of a plan.

    python traffic.py PLAN.json RESULT.json

PLAN is a list of engines: `model`; `options` of LLM, among which the executor "uni" is this process alone, or one rank
of those that meet at a `port`; `env` for this engine alone; `setup`, a module whose `install` is
called first, and whose `report`, if it has one, last; `targets`, functions of vLLM to look at afterwards; `waves`, each
a list of requests. A request has a `prompt` (token ids; tests/vllm/rich_prompts.py says what else), `sampling`
parameters, the engine step `at` which it arrives, and the step `abort_at` which it is aborted, if any. `probe` counts
rows on the workers.

RESULT holds for every engine what each request gave, what the workers' modules saw, each patch's state in this
process, and whether the engine's functions are the ones that vLLM shipped.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.vllm.gdn_engines import executor
from tests.vllm.rich_prompts import engine_prompt

#: What stands in a log before the lines of each engine.
BEGINS = "=== the next engine begins"
TOP = 4
Output = dict[str, Any]


def plain_logprobs(positions: list[Any] | None) -> list[dict[str, float] | None]:
    """Log-probabilities by token, for every position."""
    return [p and {str(token): one.logprob for token, one in p.items()} for p in positions or []]


def answer(output: Any) -> Output:
    """One request's result: its samples, and tokens that were taken from the prefix cache."""
    return {
        "samples": [
            {"tokens": list(s.token_ids), "logprobs": plain_logprobs(s.logprobs), "finish": s.finish_reason}
            for s in output.outputs
        ],
        "prompt_logprobs": plain_logprobs(output.prompt_logprobs),
        "cached": output.num_cached_tokens,
    }


def sampling_params(values: dict[str, Any]) -> Any:
    """SamplingParams, greedy and without end of sequence unless asked otherwise."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    values = {"temperature": 0, "ignore_eos": True, "detokenize": False, **values}
    values["output_kind"] = RequestOutputKind.FINAL_ONLY
    choice = values.pop("choice", None)
    if choice is not None:
        values["structured_outputs"] = StructuredOutputsParams(choice=choice)
    return SamplingParams(**values)


def send(llm: Any, wave: list[dict[str, Any]], name: str) -> list[Output | None]:
    """Add and abort requests at their steps until all are done; None for an aborted one."""
    engine = llm.llm_engine
    ids = [f"{name}-{index}" for index in range(len(wave))]
    last_event = max(max(r.get("at", 0), r.get("abort_at") or 0) for r in wave)
    done: dict[str, Output] = {}
    step = 0
    while step <= last_event or engine.has_unfinished_requests():
        for request_id, request in zip(ids, wave, strict=True):
            if request.get("at", 0) == step:
                engine.add_request(request_id, engine_prompt(request), sampling_params(request["sampling"]))
            if request.get("abort_at") == step:
                engine.abort_request([request_id])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = answer(output)
        step += 1
        if step > 2000:
            raise TimeoutError(f"wave {name} does not end; finished are {sorted(done)}")
    return [done.get(request_id) for request_id in ids]


def counter(llm: Any, name: str) -> int | None:
    """The value of one of vLLM's own counters."""
    values = [metric.value for metric in llm.get_metrics() if metric.name == name]
    return int(sum(values)) if values else None


def own_metrics(llm: Any) -> list[dict[str, Any]]:
    """The metrics that the overlay adds: name, labels and value of each series."""
    found = [metric for metric in llm.get_metrics() if metric.name.startswith("vllm:atom_")]
    return [{"name": metric.name, "labels": metric.labels, "value": metric.value} for metric in found]


def free_blocks(llm: Any) -> int:
    """Cache blocks that the scheduler could hand out."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def shipped(targets: list[str]) -> dict[str, bool]:
    """Whether each `module:qualname`, where imported, is defined in vLLM's own file."""
    import vllm

    home = Path(str(vllm.__file__)).parent
    found = {}
    for target in targets:
        module, _, qualname = target.partition(":")
        if module in sys.modules:
            value: Any = sys.modules[module]
            for part in qualname.split("."):
                value = getattr(value, part)
            code = getattr(value, "__code__", None)
            found[target] = code is not None and Path(code.co_filename).is_relative_to(home)
    return found


def shut_down(llm: Any) -> None:
    """End the engine. A stock one on the CPU asks torch for an accelerator while doing so, and fails."""
    try:
        llm.llm_engine.engine_core.shutdown()
    except RuntimeError as error:
        if "NVIDIA driver" not in str(error):
            raise


def run(engine: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, send it every wave, shut it down."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from atom_patches.core.registry import REGISTRY

    os.environ.update(engine.get("env", {}))
    setup = importlib.import_module(engine["setup"]) if engine.get("setup") else None
    if setup is not None:
        setup.install()
    options = {"dtype": "float32", "enforce_eager": True, **engine["options"]}
    if options.get("distributed_executor_backend") == "uni":
        options["distributed_executor_backend"] = executor(engine)
    if engine.get("probe"):
        options["worker_extension_cls"] = "row_probe.RowProbe"
    llm = LLM(model=engine["model"], seed=0, disable_log_stats=False, **options)
    try:
        result: dict[str, Any] = {"waves": [], "rows": [], "free_before": free_blocks(llm)}
        if engine.get("probe"):
            llm.collective_rpc("probe_start")
            result["profile_rows"] = llm.collective_rpc("probe_profile")
            result["experts"] = llm.collective_rpc("probe_experts")
        for index, wave in enumerate(engine["waves"]):
            result["waves"].append(send(llm, wave, f"wave{index}"))
            if engine.get("probe"):
                result["rows"].append(llm.collective_rpc("probe_take"))
        if engine.get("probe"):
            result["held"] = llm.collective_rpc("probe_requests")
        result["free_after"] = free_blocks(llm)
        result["preemptions"] = counter(llm, "vllm:num_preemptions")
        result["metrics"] = own_metrics(llm)
        if setup is not None and hasattr(setup, "report"):
            result["report"] = setup.report()
        status = REGISTRY.status("vllm")
        result["patches"] = {one.id: one.state for one in status}
        result["shipped"] = shipped(engine.get("targets", []))
        shut_down(llm)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return result


def save(results: list[dict[str, Any]], path: Path) -> None:
    """Replace the file as a whole: who reads it while engines run, or after one has failed, finds complete results."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(results))
    scratch.replace(path)


def main() -> None:
    plan, result = Path(sys.argv[1]), Path(sys.argv[2])
    results = []
    for engine in json.loads(plan.read_text()):
        outer = dict(os.environ)
        print(BEGINS, flush=True)
        results.append(run(engine))
        os.environ.clear()
        os.environ.update(outer)
        save(results, result)
    # What is left to do at exit is the engine's own, and may wait for a rank that has gone already.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
