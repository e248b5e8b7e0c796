"""The references of the package's operators, in plain torch."""

from __future__ import annotations

from .chunk_reference import *  # noqa: F403
from .recurrent_reference import *  # noqa: F403
