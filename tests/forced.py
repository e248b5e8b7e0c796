"""Patches wanted by whatever configuration there is, and an engine that nobody asks to describe one."""

from __future__ import annotations

import dataclasses
from typing import Any

from atom_patches.core import Engine, Patch, Verdict


class Config:
    """Stands for an engine's configuration where the conditions are forced."""

    additional_config: dict[str, Any] = {}
    parallel_config = model_config = None


def forced(patch: Patch) -> Patch:
    """A copy that every configuration wants; hooks that hand configurations over are wanted anyway."""
    when = None if patch.kind == "bootstrap" else lambda config: Verdict(config is not None, "forced")
    copy = dataclasses.replace(patch, when=patch.when if when is None else when)
    copy.builder = patch.builder
    return copy


def undescribed(engine: Engine) -> Engine:
    """The engine, for the configuration above."""
    return dataclasses.replace(engine, describe=lambda config: {}, bind_cache_key=lambda config, active: None)
