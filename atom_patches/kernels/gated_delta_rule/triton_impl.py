"""The package's operators in Triton."""

from __future__ import annotations

from ._chunk_triton import *  # noqa: F403
from ._recurrent_triton import *  # noqa: F403
