"""Scopes nest, end with their block however it ends, and are seen by nobody else."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.scope import Scope


class Stop(Exception):
    """What a block is left with."""


#: A tree of blocks, and whether each is left by an exception.
blocks = st.recursive(
    st.tuples(st.booleans(), st.just(())),
    lambda inner: st.tuples(st.booleans(), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=8,
)


@given(blocks)
def test_the_value_before_a_block_holds_after_it(tree: tuple[bool, tuple]) -> None:
    scope: Scope[int] = Scope("number")

    def visit(node: tuple[bool, tuple], depth: int) -> None:
        raises, children = node
        before = scope.current()
        with suppress(Stop), scope.entered(depth) as value:
            assert value == scope.current() == scope.required() == depth
            for child in children:
                visit(child, depth + 1)
            assert scope.current() == depth
            if raises:
                raise Stop
        assert scope.current() == before

    visit(tree, 1)
    assert scope.current() is None


def test_nothing_is_current_outside() -> None:
    scope: Scope[int] = Scope("number")
    with pytest.raises(LookupError, match="no number is current"):
        scope.required()


def test_other_threads_do_not_see_it() -> None:
    scope: Scope[int] = Scope("number")
    seen: list[int | None] = []
    with scope.entered(1):
        thread = threading.Thread(target=lambda: seen.append(scope.current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_scopes_do_not_mix() -> None:
    one: Scope[int] = Scope("number")
    other: Scope[int] = Scope("number")
    with one.entered(1):
        assert other.current() is None
