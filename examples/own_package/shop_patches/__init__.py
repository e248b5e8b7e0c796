"""Patches for `shop`. Every FEATURE/NAME.py below is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_patches.core import Engine, hooks


def _no_cache(config: Any, active: Mapping[str, str]) -> None:
    """`shop` compiles nothing, so no cache has to tell patched from unpatched code."""


def _describe(config: Any) -> dict[str, str]:
    return {"currency": config.currency}


ENGINE = Engine(
    name="shop",
    package="shop",
    distributions=("shop",),
    declarations="shop_patches",
    bind_cache_key=_no_cache,
    describe=_describe,
)


def arm() -> None:
    """Have the patches wait for their targets: before `shop` is imported, or after."""
    hooks.arm((ENGINE,))
