"""What the core has to know about one engine, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Engine:
    """One engine that can be patched.

    Args:
        name: `"vllm"`; also the first part of its patches' ids.
        package: the top-level package whose modules are patched.
        distributions: names under which the package is published, in the order in which they are tried.
        declarations: the package below which `FEATURE/PATCH.py` files declare patches.
        bind_cache_key: given a configuration and the active graph-changing patches (id -> version of the code),
            makes the engine's compile cache depend on them, and on nothing when there are none. Idempotent.
        describe: the options of a configuration that patches decide by, as text, for a person.
        built: `module:qualname` of a class, such as the configuration's: a live instance means that an engine was
            built. Empty: nothing is said about engines that were built before the overlay was armed.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    declarations: str
    bind_cache_key: Callable[[Any, Mapping[str, str]], None]
    describe: Callable[[Any], Mapping[str, str]]
    built: str = ""
