"""What each model runner of an engine did, for tests: one file a process in the folder that SGLANG_STEPS names.

Its first line is the model's class, and which classes of modules there are how often; then a line for every forward
pass: rank, mode, rows, requests, and the rows of all ranks if the engine exchanges them.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import wrapt

FOLDER = "SGLANG_STEPS"


def _rank(runner: Any) -> int:
    if hasattr(runner, "ps"):
        return runner.ps.tp_rank
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return get_parallel().tp_rank


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _note(line: dict[str, Any]) -> None:
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _noting(forward: Any) -> Any:
    @functools.wraps(forward)
    def noted(runner: Any, forward_batch: Any, *args: Any, **options: Any) -> Any:
        if not getattr(runner, "steps_are_noted", False):
            runner.steps_are_noted = True
            modules = Counter(_name(type(module)) for module in runner.model.modules())
            _note({"rank": _rank(runner), "model": _name(type(runner.model)), "modules": modules})
        batch = forward_batch
        ids = batch.input_ids
        step = {"rank": _rank(runner), "mode": batch.forward_mode.name, "requests": batch.batch_size}
        step |= {"rows": None if ids is None else ids.shape[0], "ranks": batch.global_num_tokens_cpu}
        _note(step)
        return forward(runner, forward_batch, *args, **options)

    return noted


def install() -> None:
    """Wrap the model runner when it is imported, where a folder is named."""
    if FOLDER not in os.environ:
        return

    def wrap(module: Any) -> None:
        module.ModelRunner.forward = _noting(module.ModelRunner.forward)

    wrapt.register_post_import_hook(wrap, "sglang.srt.model_executor.model_runner")
