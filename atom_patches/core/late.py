"""Notice that the overlay was armed after an engine had been built: that engine runs without it."""

from __future__ import annotations

import gc
import sys

from atom_patches.core import gates, settings
from atom_patches.core import report as reports
from atom_patches.core.engine import Engine
from atom_patches.core.log import logger
from atom_patches.core.patch import PatchError, Target

ROLE = "armed too late"
"""What a process says about itself when its engine was built before the overlay was armed."""


def built(engine: Engine) -> bool:
    """Whether what `engine` is built from, or has built, is alive in this process. Imports nothing."""
    if not engine.built:
        return False
    module, qualname = Target.parse(engine.built)
    cls = getattr(sys.modules.get(module), qualname, None)
    if not isinstance(cls, type):
        return False
    return any(isinstance(found, cls) for found in gc.get_referrers(cls))


def report(engine: Engine) -> None:
    """Say so: in the log, and in this process's state file for `doctor`.

    Raises:
        PatchError: `ATOM_PATCHES_STRICT=1`.
    """
    from atom_patches.core.registry import REGISTRY

    message = (
        f"{engine.name} had built an engine in this process before atom_patches was armed: that engine is not "
        "patched. Arm earlier: `import atom_patches` at the top of the script, or set ATOM_PATCHES=1."
    )
    if settings.strict():
        raise PatchError(message)
    logger().warning("%s", message)
    try:
        reports.publish(
            role=ROLE,
            engine=engine.name,
            version=gates.engine_version(engine),
            config={},
            patches=REGISTRY.status(engine.name),
            notes=[message],
        )
    except reports.StateDirError as error:
        logger().warning("%s", error)
