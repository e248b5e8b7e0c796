"""The product in plain torch."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """See the package's schema."""
    return (x.float() @ weight.float().T).to(x.dtype)
