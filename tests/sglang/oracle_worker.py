"""Transformers in float32 on what engines answered: `python oracle_worker.py PLAN RESULT`, two files of JSON.

A process of its own, without SGLang, which changes transformers when it is imported. The plan has lists of `[prompt,
generated]` by the checkpoint's folder. For each there come the greedy continuation of the same length, the
log-probabilities of the tokens generated, each after those before it, and by how much the greedy tokens won, at least.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def _load(path: str) -> Any:
    torch.set_num_threads(1)
    [family] = transformers.AutoConfig.from_pretrained(path).architectures or []
    return getattr(transformers, family).from_pretrained(path, dtype=torch.float32).eval()


def _judge(model: Any, prompt: list[int], generated: list[int]) -> dict[str, Any]:
    def logprobs(tokens: list[int]) -> torch.Tensor:
        rows = model(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
        return rows.float().log_softmax(-1)

    ids = torch.tensor([prompt])
    new = len(generated)
    with torch.no_grad():
        grown = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        greedy = grown[0, len(prompt) :].tolist()
        best = logprobs(prompt + greedy).topk(2).values
        scored = logprobs(prompt + generated).gather(1, torch.tensor(generated)[:, None])[:, 0]
    return {"greedy": greedy, "logprobs": scored.tolist(), "margin": (best[:, 0] - best[:, 1]).min().item()}


def main() -> None:
    plan, result = map(Path, sys.argv[1:])
    asked: dict[str, list[tuple[list[int], list[int]]]] = json.loads(plan.read_text())
    answers: dict[str, list[dict[str, Any]]] = {}
    for path, pairs in asked.items():
        model = _load(path)
        answers[path] = [_judge(model, prompt, generated) for prompt, generated in pairs]
    result.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
