"""Transformers in float32 on what engines answered: `python oracle_worker.py PLAN RESULT`, two files of JSON.

A process of its own, without SGLang, which changes transformers when it is imported. The plan has under `asked` lists
of `[prompt, generated]` by `FOLDER#CACHE`: the checkpoint's, and what the KV cache rounds to (sparse_oracle.py; of
models with sparse attention alone). For each there come the greedy continuation of the same length, by how much its
tokens won, at least, and of the tokens generated, each after those before it, the log-probabilities, and those of the
best tokens in their places. With `rounded`, there are the log-probabilities in bfloat16, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sparse_oracle
import torch
import transformers


def _load(path: str, dtype: torch.dtype) -> Any:
    [family] = transformers.AutoConfig.from_pretrained(path).architectures or []
    return getattr(transformers, family).from_pretrained(path, dtype=dtype).eval()


def _logprobs(model: Any, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """In each generated token's place, those of the whole vocabulary."""
    rows = model(torch.tensor([[*prompt, *generated][:-1]])).logits[0, len(prompt) - 1 :]
    return rows.float().log_softmax(-1)


def _of(generated: list[int], logprobs: torch.Tensor) -> list[float]:
    return logprobs.gather(1, torch.tensor(generated)[:, None])[:, 0].tolist()


def _judge(model: Any, rounded: Any, prompt: list[int], generated: list[int]) -> dict[str, Any]:
    ids, new = torch.tensor([prompt]), len(generated)
    grown = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    greedy = grown[0, len(prompt) :].tolist()
    best = _logprobs(model, prompt, greedy).topk(2).values
    scored = _logprobs(model, prompt, generated)
    verdict: dict[str, Any] = {"greedy": greedy, "margin": (best[:, 0] - best[:, 1]).min().item()}
    verdict |= {"logprobs": _of(generated, scored), "best": scored.max(-1).values.tolist()}
    if rounded is not None:
        verdict["rounded"] = _of(generated, _logprobs(rounded, prompt, generated))
    return verdict


@torch.no_grad()
def main() -> None:
    plan_file, result = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    plan = json.loads(plan_file.read_text())
    answers: dict[str, list[dict[str, Any]]] = {}
    for key, pairs in plan["asked"].items():
        path, _, cache = key.partition("#")
        model = _load(path, torch.float32)
        rounded = _load(path, torch.bfloat16) if plan["rounded"] else None
        with sparse_oracle.served(cache, model, rounded):
            answers[key] = [_judge(model, rounded, prompt, generated) for prompt, generated in pairs]
    result.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
