"""The references of the package's operators, in plain torch."""

from __future__ import annotations

from .decode_reference import *  # noqa: F403
from .prefill_reference import *  # noqa: F403
