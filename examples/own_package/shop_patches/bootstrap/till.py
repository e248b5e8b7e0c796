"""A new till hands its configuration to the registry, which decides by it.

Why:         other patches are wanted for some tills only.
How:         wrap the constructor.
Remove when: no patch decides by a configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="shop.bootstrap.till",
    target="shop.till:Till.__init__",
    supports="shop>=2,<3",
    kind="bootstrap",
    upstream="none",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the till is made."""
    from atom_patches.core.registry import REGISTRY

    def __init__(self: Any, config: Any) -> None:
        REGISTRY.configure("shop", config, "till")
        original(self, config)

    return __init__
