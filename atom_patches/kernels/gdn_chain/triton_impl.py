"""The package's operators in Triton."""

from __future__ import annotations

from ._decode_triton import *  # noqa: F403
from ._prefill_triton import *  # noqa: F403
