"""Swiss francs are rounded to five centimes: there is no smaller coin.

Why:         a customer cannot pay 10.03 in cash.
How:         wrap the sum.
Remove when: every release in `supports` rounds by currency.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch, Verdict


def swiss(config: Any) -> Verdict:
    """Whether the till is for Swiss francs."""
    return Verdict(config.currency == "CHF", f"the currency is {config.currency}")


PATCH = Patch(
    id="shop.rounding.total",
    target="shop.till:Till.total",
    supports="shop>=2,<3",
    kind="correctness",
    when=swiss,
    upstream="none: asked for",
)


@PATCH.around
def total(original: Any) -> Any:
    """The sum, to five centimes."""

    def total(self: Any, prices: Any) -> float:
        return round(original(self, prices) * 20) / 20

    return total
