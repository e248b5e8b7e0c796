"""The patch engine: declarations, decisions, application. Knows no framework.

Declarations need only what is exported here; the machinery is imported where it is used.
"""

from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch, PatchError, State, Target, Verdict

__all__ = ["Engine", "Patch", "PatchError", "State", "Target", "Verdict"]
