"""Each patch by itself, wanted, on an engine whose functions have changed: run by `test_every_patch.py`, prints JSON.

    python every_patch.py ENGINE ID...

No engine is imported: a patch is judged by the source.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
from typing import Any

from atom_patches import arming
from atom_patches.core import Patch, PatchError, Verdict, discovery
from atom_patches.core.log import logger
from atom_patches.core.registry import Registry


class Config:
    """Stands for an engine's configuration; the condition is forced."""


class Warnings(logging.Handler):
    """Collects what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def wanted(patch: Patch) -> Patch:
    """The patch, without a group, and wanted by every configuration."""
    facts = {one.name: getattr(patch, one.name) for one in dataclasses.fields(patch) if one.init}
    copy = Patch(**facts | {"group": None, "when": lambda config: Verdict(True, "forced")})
    copy.builder = patch.builder
    return copy


def outcome(engine: Any, patch: Patch) -> dict[str, Any]:
    """What two engine instances of one process are told."""
    registry, heard = Registry(), Warnings()
    logger().addHandler(heard)
    errors: list[str] = []
    configs = [Config(), Config()]
    try:
        registry.arm(engine, [wanted(patch)])
        for config in configs:
            try:
                registry.configure(engine.name, config, "engine core")
            except PatchError as error:
                errors.append(str(error))
    finally:
        logger().removeHandler(heard)
    (found,) = registry.status(engine.name)
    return {"errors": errors, "warnings": heard.messages, "state": found.state, "reason": found.reason}


def main() -> None:
    arming.disarm()
    described = importlib.import_module(f"atom_patches.{sys.argv[1]}.engine").ENGINE
    engine = dataclasses.replace(described, describe=lambda config: {}, bind_cache_key=lambda config, active: None)
    patches = {patch.id: patch for patch in discovery.load(engine)}
    results = {name: outcome(engine, patches[name]) for name in sys.argv[2:]}
    print("RESULT " + json.dumps({"imported": engine.package in sys.modules, "patches": results}))


if __name__ == "__main__":
    main()
