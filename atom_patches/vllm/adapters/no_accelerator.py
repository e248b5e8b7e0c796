"""torch's accelerator interface on a machine without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def without_synchronize() -> Iterator[None]:
    """Let torch.accelerator.synchronize do nothing inside the block, unless there is an accelerator."""
    if torch.accelerator.is_available():
        yield
        return
    with patch.object(torch.accelerator, "synchronize", lambda *args, **kwargs: None):
        yield
