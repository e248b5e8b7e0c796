"""Engines of vLLM's tests one after the other, on some ranks, where one that fails costs only itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Rank by rank what an engine gave, or how it failed.
Outcome = list[dict[str, Any]] | str
#: Runs engines by key, with plans and results in a folder.
Start = Callable[[Path, dict[Any, Any]], dict[Any, list[dict[str, Any]]]]


def run_all(
    logs: Path, name: str, start: Start, engines: dict[Any, Any], say: Callable[[str], None]
) -> dict[Any, Outcome]:
    """Run the engines one after the other; after one that fails, start again with the next."""
    outcomes: dict[Any, Outcome] = {}
    while left := {key: plan for key, plan in engines.items() if key not in outcomes}:
        folder = logs / f"{name}-from-{len(outcomes)}"
        folder.mkdir(parents=True)
        try:
            outcomes |= start(folder, left)
        except AssertionError as error:
            done = finished(folder)
            outcomes |= dict(zip(left, zip(*done, strict=False), strict=False))
            failed = list(left)[min(map(len, done), default=0)]
            outcomes[failed] = f"{cause(str(error))} (log in {folder})"
            say(f"{name}: {failed} failed: {outcomes[failed]}")
    return outcomes


def finished(folder: Path) -> list[list[dict[str, Any]]]:
    """By rank, the results of the engines that it finished."""
    ranks = len(list(folder.glob("plan*.json")))
    files = [folder / f"result{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else [] for file in files]


def cause(log: str) -> str:
    """The last line that names an error, without the marks of the rank; else the first line."""
    lines = [re.sub(r"^(\s*\[rank\d+\]:)*\s*", "", line) for line in log.splitlines()]
    return next((line for line in reversed(lines) if "Error: " in line), lines[0])
