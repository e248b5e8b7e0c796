"""The compile-cache key of vLLM: what is added to a user's `additional_config`, and what is left alone."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_patches.vllm.engine import KEY, KeyedConfig, bind_cache_key

ACTIVE = st.dictionaries(st.sampled_from(["vllm.a", "vllm.b", "vllm.c"]), st.sampled_from(["1", "2"]))
USERS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3)


class Hashed:
    def __init__(self, text: str) -> None:
        self.text = text

    def compute_hash(self) -> str:
        return self.text


def key_of(additional: Any) -> str:
    """As `VllmConfig.compute_hash` reads it."""
    if not additional:
        return "None"
    return json.dumps(additional, sort_keys=True) if isinstance(additional, dict) else additional.compute_hash()


@settings(deadline=None)
@given(users=USERS, sequence=st.lists(ACTIVE, min_size=1, max_size=4))
def test_the_last_binding_alone_counts(users: dict[str, Any], sequence: list[dict[str, str]]) -> None:
    before = dict(users)
    config = SimpleNamespace(additional_config=users)
    for active in sequence:
        bind_cache_key(config, active)
    direct = SimpleNamespace(additional_config=users)
    bind_cache_key(direct, sequence[-1])
    assert key_of(config.additional_config) == key_of(direct.additional_config)
    assert users == before
    assert (key_of(config.additional_config) == key_of(users)) == (not sequence[-1])


@settings(deadline=None)
@given(first=ACTIVE, second=ACTIVE, one=st.sampled_from("ab"), other=st.sampled_from("ab"))
def test_objects_of_the_users_own(first: dict[str, str], second: dict[str, str], one: str, other: str) -> None:
    left, right = SimpleNamespace(additional_config=Hashed(one)), SimpleNamespace(additional_config=Hashed(other))
    bind_cache_key(left, second)
    bind_cache_key(left, first)
    bind_cache_key(right, second)
    same = (first, one) == (second, other)
    assert (key_of(left.additional_config) == key_of(right.additional_config)) == same
    assert left.additional_config.text == one
    bind_cache_key(left, {})
    assert type(left.additional_config) is Hashed


def test_nothing_active_touches_nothing() -> None:
    users: dict[str, Any] = {"mine": 1}
    config = SimpleNamespace(additional_config=users)
    bind_cache_key(config, {})
    assert config.additional_config is users


def test_keyed_object_pickles_and_hides_nothing() -> None:
    keyed = pickle.loads(pickle.dumps(KeyedConfig(Hashed("a"), {"vllm.a": "1"})))
    assert keyed.text == "a"
    with pytest.raises(AttributeError):
        _ = keyed.no_such_name


def test_key_is_ours_by_name() -> None:
    config = SimpleNamespace(additional_config={})
    bind_cache_key(config, {"vllm.a": "1"})
    assert config.additional_config == {KEY: {"vllm.a": "1"}} == {"atom_patches": {"vllm.a": "1"}}
