"""A till adds up prices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """What a till is made for."""

    currency: str


class Till:
    """Adds up what a customer has to pay."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def total(self, prices: Iterable[float]) -> float:
        """The sum, to the cent."""
        return round(sum(prices), 2)
