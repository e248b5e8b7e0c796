"""What holds for every test."""

from __future__ import annotations

from atom_patches import arming

# Tests import parts of the package, which arms it and would arm every process that a test starts. A test that
# wants an armed process asks for one.
arming.disarm()
