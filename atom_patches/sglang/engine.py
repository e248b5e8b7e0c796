"""SGLang, as the core sees it. No patch of it is declared yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_patches.core import Engine


def bind_cache_key(config: Any, active: Mapping[str, str]) -> None:
    """Nothing to bind: no declared patch changes a graph of SGLang's.

    Raises:
        ValueError: one does now, and has to be bound to SGLang's cache key here.
    """
    if active:
        raise ValueError(f"no compile-cache key of SGLang covers {', '.join(sorted(active))}")


def describe(config: Any) -> dict[str, str]:
    """The model and the parallel layout of a `ServerArgs`."""
    names = ("model_path", "tp_size", "pp_size", "dp_size")
    return {name: str(getattr(config, name)) for name in names}


ENGINE = Engine(
    name="sglang",
    package="sglang",
    distributions=("sglang",),
    declarations="atom_patches.sglang",
    bind_cache_key=bind_cache_key,
    describe=describe,
)
