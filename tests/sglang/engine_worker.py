"""One SGLang engine in a process of its own: `python engine_worker.py PLAN RESULT`, two files of JSON.

SGLang ends the process that started an engine when one of the engine's processes dies, so no test starts one itself.
The plan has `options`, of sglang.Engine, and `waves`, lists of requests, one wave after the other. A request has
`prompt` (token ids), `new` (how many tokens to generate), `at` (seconds after the wave's beginning) and `rank` (which
data-parallel rank is to answer, or null). One that `goes_on` follows, with its prompt, what the first request of the
wave before asked and was answered. Answers have the `prompt` that was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def _send(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(request["at"])
    answer = await engine.async_generate(
        input_ids=request["prompt"],
        sampling_params={"temperature": 0, "max_new_tokens": request["new"], "ignore_eos": True},
        return_logprob=True,
        routed_dp_rank=request["rank"],
    )
    logprobs = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    cached = answer["meta_info"]["cached_tokens"]
    return {"prompt": request["prompt"], "tokens": answer["output_ids"], "logprobs": logprobs, "cached": cached}


async def _all(engine: Any, waves: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    answers: list[list[dict[str, Any]]] = []
    for wave in waves:
        before = [*answers[-1][0]["prompt"], *answers[-1][0]["tokens"]] if answers else []
        asked = [{**one, "prompt": before + one["prompt"]} if one.get("goes_on") else one for one in wave]
        answers.append(await asyncio.gather(*(_send(engine, request) for request in asked)))
    return answers


def main() -> None:
    import sglang

    plan_file, result_file = map(Path, sys.argv[1:])
    plan = json.loads(plan_file.read_text())
    engine = sglang.Engine(  # pyright: ignore[reportAttributeAccessIssue]
        **plan["options"]
    )
    result = engine.loop.run_until_complete(_all(engine, plan["waves"]))
    result_file.write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main()
