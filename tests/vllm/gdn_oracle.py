"""Transformers in float32 as an independent oracle for tokens and log-probabilities, and engines to compare with it."""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: An engine's log-probability may differ from the oracle's by this much (7e-5 is seen); every token of the oracle
#: wins by at least twice as much, so that equal tokens are not a matter of luck.
CLOSE = 1.5e-4

sys.path.insert(0, str(ROOT / "tools"))
from checkpoints import checkpoint  # noqa: E402
from quantised import quantised  # noqa: E402

Prompt = tuple[int, ...]


def prompt(length: int, seed: int) -> Prompt:
    """Random byte tokens."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


class Oracle:
    """One checkpoint in transformers; `path` is what engines read. NAME+FORMAT is a quantised one."""

    def __init__(self, name: str) -> None:
        import transformers

        torch.set_num_threads(1)  # the engines run at the same time, and two threads of a tiny model only wait
        base, _, form = name.partition("+")
        self.path, plain = quantised(base, form) if form else (checkpoint(name),) * 2
        [family] = transformers.AutoConfig.from_pretrained(plain).architectures or []
        self.model = getattr(transformers, family).from_pretrained(plain, dtype=torch.float32).eval()
        self.answers: dict[tuple[Prompt, int], tuple[list[int], torch.Tensor]] = {}

    def answer(self, tokens: Prompt, new: int) -> tuple[list[int], torch.Tensor]:
        """The greedy continuation and the log-probabilities [len(tokens) + new - 1, V] after every token."""
        if (tokens, new) not in self.answers:
            ids = torch.tensor([tokens])
            with torch.no_grad():
                grown = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                logprobs = self.model(grown[:, :-1]).logits[0].log_softmax(-1)
            best = logprobs[len(tokens) - 1 :].topk(2)
            chosen = grown[0, len(tokens) :].tolist()
            assert best.indices[:, 0].tolist() == chosen, "the oracle disagrees with itself"
            margin = (best.values[:, 0] - best.values[:, 1]).min().item()
            assert margin > 2 * CLOSE, f"a prompt of {len(tokens)} tokens has two best continuations: {margin}"
            self.answers[tokens, new] = (chosen, logprobs)
        return self.answers[tokens, new]


@functools.cache
def oracle(name: str) -> Oracle:
    """The oracle for a checkpoint of tools/checkpoints.py."""
    return Oracle(name)


def check(name: str, tokens: Prompt, got: dict[str, Any]) -> None:
    """One request's result equals the oracle's: every token, and every reported log-probability closely."""
    chosen, logprobs = oracle(name).answer(tokens, len(got["tokens"]))
    assert got["tokens"] == chosen
    assert len(got["logprobs"]) == len(chosen)
    _check_logprobs(got["logprobs"], logprobs[len(tokens) - 1 :])
    if got["prompt_logprobs"]:
        assert len(got["prompt_logprobs"]) == len(tokens) and got["prompt_logprobs"][0] is None
        _check_logprobs(got["prompt_logprobs"][1:], logprobs)


def _check_logprobs(reported: list[dict[str, float]], expected: torch.Tensor) -> None:
    for position, values in enumerate(reported):
        assert len(values) > 1
        for token, value in values.items():
            assert abs(value - expected[position, int(token)].item()) < CLOSE, (position, token)


def free_port() -> int:
    """A port that is free now, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the overlay armed by vLLM's plugin list alone."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATOM_PATCH", "VLLM_"))}
    return {
        **kept,
        "VLLM_PLUGINS": "atom",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_engines(
    folder: Path,
    plans: list[list[dict[str, Any]]],
    envs: list[dict[str, str]],
    script: str = "gdn_engines.py",
    seconds: float = 400,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run one process of `script` per plan and environment at the same time; return their results.

    Args:
        folder: for plans, results and logs.
        plans: of each process.
        envs: of each process.
        script: in this folder.
        seconds: how long all may take.
        meanwhile: called again and again.

    Raises:
        AssertionError: a process failed or did not end in time; with the end of its log.
    """
    processes = []
    for rank, (plan, env) in enumerate(zip(plans, envs, strict=True)):
        (folder / f"plan{rank}.json").write_text(json.dumps(plan))
        command = [sys.executable, str(HERE / script), f"plan{rank}.json", f"result{rank}.json"]
        log = (folder / f"log{rank}.txt").open("w")
        processes.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))
    _wait(processes, folder, seconds, meanwhile)
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(len(plans))]


def _wait(
    processes: list[subprocess.Popen[bytes]], folder: Path, seconds: float, meanwhile: Callable[[], None]
) -> None:
    """Wait for all; when one fails or time is up, stop the others and show what it said."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if all(code == 0 for code in codes):
            return
        if failed or time.monotonic() > deadline:
            break
        meanwhile()
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    shown = failed or range(len(processes))
    logs = "\n".join(f"--- rank {rank}\n{(folder / f'log{rank}.txt').read_text()[-6000:]}" for rank in shown)
    raise AssertionError(f"exit codes {codes}\n{logs}")
