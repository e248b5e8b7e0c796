"""One line for "when this module has been imported, change this name in it"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt


def replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the place of what `module` calls `name` ("Class.method" too), once it is imported."""

    def change(imported: Any) -> None:
        owner = imported
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, make(getattr(owner, last, None)))

    wrapt.register_post_import_hook(change, module)
