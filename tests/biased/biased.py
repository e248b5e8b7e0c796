"""A plugin of vLLM's and SGLang's that makes the norms of ATOM decoders wrong by the share in BIASED."""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Scale what each norm of a sum gives."""
    from atom_patches.models.norms import RmsNorm

    original, share = RmsNorm.of_sum, float(os.environ["BIASED"])

    def of_sum(self: RmsNorm, x: Any, residual: Any) -> Any:
        normed, total = original(self, x, residual)
        return normed * (1 + share), total

    RmsNorm.of_sum = of_sum
