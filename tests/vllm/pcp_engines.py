"""The engines and traffic of the prefill-context-parallel tests, and what their results are compared with.

Most engines run under vLLM's external launcher: one process a rank, in which several engines follow each other, so
that a rank's imports are paid once. Engines with vLLM's own worker processes are started apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.gdn_oracle import CLOSE, ROOT, Oracle, Prompt, environment, free_port, oracle, prompt, run_engines
from tests.vllm.traffic import BEGINS, TOP

NEW = 10
PATH = f"{ROOT}:{ROOT / 'tools'}"
Engine = dict[str, Any]
Request = dict[str, Any]

#: More prompts than run at once: one token, shorter than the convolution, odd lengths, more than a chunk. By these
#: seeds no model of the tests has two best continuations.
MIXED: list[Prompt] = [prompt(n, seed=2 if n == 64 else 1) for n in (1, 5, 37, 150, 2, 64, 129, 3, 400)]


def request(tokens: Prompt, at: int = 0, abort_at: int | None = None, **sampling: Any) -> Request:
    """One greedy request of the traffic with log-probabilities, unless asked otherwise."""
    return {
        "prompt": list(tokens),
        "at": at,
        "abort_at": abort_at,
        "sampling": {"max_tokens": NEW, "logprobs": TOP, **sampling},
    }


def wave(prompts: list[Prompt] = MIXED, **sampling: Any) -> list[Request]:
    """The prompts at once."""
    return [request(tokens, **sampling) for tokens in prompts]


def engine(name: str, waves: list[list[Request]], **more: Any) -> Engine:
    """The plan of one engine; `more` are options of LLM, or of the plan where it knows them."""
    plan = {key: more.pop(key) for key in ("env", "port", "probe", "setup", "targets") if key in more}
    text_only = {"language_model_only": True} if name.startswith("qwen3_5") else {}
    options = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256, enable_prefix_caching=False)
    return {"model": str(oracle(name).path), "waves": waves, "options": {**options, **text_only, **more}, **plan}


def launch(
    folder: Path,
    ranks: int,
    engines: dict[Any, Engine],
    seconds: float = 400,
    meanwhile: Callable[[], None] = lambda: None,
    /,
    **env: str,
) -> dict[Any, list[dict[str, Any]]]:
    """Run the engines one after the other on `ranks` processes; each engine's results by rank."""
    plans = list(engines.values())
    for plan in plans:
        plan["options"].setdefault("distributed_executor_backend", "external_launcher")
        # A rank that is ahead must not find the store of the engine before.
        plan["env"] = {"MASTER_PORT": str(free_port()), **plan.get("env", {})}
    envs = [
        environment(
            PYTHONPATH=PATH, ATOM_PCP_MIN_ROWS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", **env,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    results = run_engines(folder, [plans] * ranks, envs, "traffic.py", seconds, meanwhile)
    return {key: [result[i] for result in results] for i, key in enumerate(engines)}


def log_of(folder: Path, results: dict[Any, list[dict[str, Any]]], key: Any, rank: int) -> str:
    """What one engine of a launch wrote on one rank."""
    return (folder / f"log{rank}.txt").read_text().split(BEGINS)[1 + list(results).index(key)]


def single(
    folder: Path,
    engines: dict[Any, Engine],
    seconds: float = 400,
    meanwhile: Callable[[], None] = lambda: None,
    /,
    **env: str,
) -> dict[Any, dict[str, Any]]:
    """Run the engines one after the other in one process, or with worker processes of vLLM's own."""
    envs = [environment(PYTHONPATH=PATH, ATOM_PCP_MIN_ROWS="1", **env)]
    [results] = run_engines(folder, [list(engines.values())], envs, "traffic.py", seconds, meanwhile)
    return dict(zip(engines, results, strict=True))


def check_greedy(name: str, sent: list[Request], got: list[dict[str, Any] | None]) -> int:
    """Every greedy request equals the oracle: tokens, and reported log-probabilities; returns how many were checked."""
    checked = 0
    for asked, answer in zip(sent, got, strict=True):
        if asked["abort_at"] is not None:
            assert answer is None, "an aborted request finished"
            continue
        assert answer is not None
        if asked["sampling"].keys() <= {"max_tokens", "logprobs", "prompt_logprobs"}:
            _check(oracle(name), asked, answer)
            checked += 1
    return checked


def _check(model: Oracle, asked: Request, answer: dict[str, Any]) -> None:
    tokens = tuple(asked["prompt"])
    chosen, logprobs = model.answer(tokens, asked["sampling"]["max_tokens"])
    [sample] = answer["samples"]
    assert sample["tokens"] == chosen, f"prompt of {len(tokens)} tokens"
    assert sample["finish"] == "length"
    _check_logprobs(sample["logprobs"], logprobs[len(tokens) - 1 :])
    if "prompt_logprobs" in asked["sampling"]:
        assert len(answer["prompt_logprobs"]) == len(tokens) and answer["prompt_logprobs"][0] is None
        _check_logprobs(answer["prompt_logprobs"][1:], logprobs)


def _check_logprobs(reported: list[dict[str, float]], expected: Any) -> None:
    assert reported or not len(expected)
    for position, values in enumerate(reported):
        for token, value in values.items():
            assert abs(value - expected[position, int(token)].item()) < CLOSE, (position, token)


def samples(wave_result: list[dict[str, Any] | None]) -> list[list[list[int]] | None]:
    """The tokens of every sample of every request."""
    return [None if answer is None else [s["tokens"] for s in answer["samples"]] for answer in wave_result]
