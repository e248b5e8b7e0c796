"""In-memory patches for unmodified vLLM and SGLang.

Importing the package arms it (see `atom_patches.arming`) and exports `ATOM_PATCHES=1`, so that the processes
which an engine starts are armed as well. `ATOM_PATCHES=0` keeps it from being armed at all. Nothing else is
imported until an engine is.
"""

from atom_patches.arming import arm

__version__ = "0.1.0"

arm()
