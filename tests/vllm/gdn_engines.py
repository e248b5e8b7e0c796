"""Run vLLM engines one after the other in this process, as one rank of several if the environment says so.

    python gdn_engines.py PLAN.json RESULT.json

PLAN is a list of engines: `model`, `options` of LLM, `rounds` of prompts (token ids), `max_tokens`, `prompt_logprobs`,
`packed_decode`, `in_process`, and the `port` where ranks meet. RESULT holds, per engine, what every prompt of every
round gave and the state of every patch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

TOP = 4


def answer(output: Any) -> dict[str, Any]:
    """One request's result: tokens, log-probabilities by position, tokens taken from the prefix cache."""

    def plain(positions: list[Any] | None) -> list[dict[str, float] | None]:
        return [p and {str(token): one.logprob for token, one in p.items()} for p in positions or []]

    return {
        "tokens": list(output.outputs[0].token_ids),
        "logprobs": plain(output.outputs[0].logprobs),
        "prompt_logprobs": plain(output.prompt_logprobs),
        "cached": output.num_cached_tokens,
    }


def unpack_decode(llm: Any) -> None:
    """Have the layers decode through the operation with separate projections instead of the packed one."""
    for module in llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.modules():
        if hasattr(module, "enable_packed_recurrent_decode"):
            module.enable_packed_recurrent_decode = False


def executor(engine: dict[str, Any]) -> type:
    """An executor whose worker is this process itself: the only one, or rank RANK of those that meet at `port`."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    class Rank(ExecutorWithExternalLauncher):
        # vLLM names its shared memory by what follows the last colon, so every engine gets an address of its own.
        def _distributed_args(self) -> tuple[str, int, int]:
            rank = int(os.environ["RANK"])
            return f"tcp://127.0.0.1:{engine['port']}", rank, rank

    return Rank if "port" in engine else UniProcExecutor


def run(engine: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, let it answer every round, shut it down."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from atom_patches.core.registry import REGISTRY

    options = dict(engine["options"])
    if engine.get("in_process", True):
        options["distributed_executor_backend"] = executor(engine)
    llm = LLM(model=engine["model"], dtype="float32", enforce_eager=True, max_model_len=512, seed=0, **options)
    if not engine.get("packed_decode", True):
        unpack_decode(llm)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=engine["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=TOP,
        prompt_logprobs=engine.get("prompt_logprobs"),
    )
    rounds = []
    for prompts in engine["rounds"]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        rounds.append([answer(output) for output in outputs])
    patches = {one.id: one.state for one in REGISTRY.status("vllm")}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"rounds": rounds, "patches": patches}


def main() -> None:
    plan, result = Path(sys.argv[1]), Path(sys.argv[2])
    results = [run(engine) for engine in json.loads(plan.read_text())]
    result.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
