"""A value that holds for the steps run inside a `with` block, and nowhere else.

A scope lives in a context variable: other threads and tasks do not see it, blocks nest, and whatever way a block is
left, an exception included, the value before it holds again.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Scope(Generic[T]):
    """What is current, for one kind of value; make it once, at module level.

    Args:
        name: what the value is, in words that complete "no … is current".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._current: ContextVar[T | None] = ContextVar(name, default=None)

    def current(self) -> T | None:
        """The value of the innermost block, None outside of all."""
        return self._current.get()

    def required(self) -> T:
        """The value of the innermost block.

        Raises:
            LookupError: outside of all blocks.
        """
        value = self._current.get()
        if value is None:
            raise LookupError(f"no {self.name} is current: this runs only within the block that enters one")
        return value

    @contextmanager
    def entered(self, value: T) -> Generator[T, None, None]:
        """Make a value current within the block."""
        token = self._current.set(value)
        try:
            yield value
        finally:
            self._current.reset(token)
