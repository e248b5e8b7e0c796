"""Answers pass for rounding only: one token that is off, a drift of all, or a bad choice does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.judgement import CLOSE, check_exact, check_rounded

STEP = 0.01


def pair(moved: tuple[float, ...], worse: float = 0.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer of four tokens, moved by so many steps, where rounding is one step up and down."""
    verdict = {"logprobs": [-1.0] * 4, "rounded": [-1.0 + STEP, -1.0 - STEP] * 2, "best": [-1.0 + worse * STEP] * 4}
    return verdict, {"logprobs": [-1.0 + steps * STEP for steps in moved]}


def test_rounding_passes() -> None:
    check_rounded([pair((1, -1, 1.9, 0)), pair((0, 4, 0, 1), worse=4)])


@pytest.mark.parametrize(
    "wrong",
    [pair((0, 0, 9, 0)), pair((4, -4, 4, -4)), pair((0, 0, 0, 0), worse=9)],
    ids=["one token", "all tokens", "a choice"],
)
def test_more_does_not(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="log-probabilities differ by"):
        check_rounded([pair((1, 1, 1, 1)), wrong])


def exact(cache: str, moved: float = 0.0, worse: float = 0.0, other: bool = False, margin: float = 3.0) -> Any:
    """An answer of four tokens, all moved, in units of what that cache allows at most."""
    worst, _ = CLOSE[cache]
    verdict = {"greedy": [1, 2, 3, 4], "margin": margin * worst, "logprobs": [-1.0] * 4}
    verdict["best"] = [-1.0 + worse * worst] * 4
    return verdict, {"tokens": [1, 2, 3, 5 if other else 4], "logprobs": [-1.0 + moved * worst] * 4}


@pytest.mark.parametrize("cache", CLOSE)
def test_the_oracle_s_tokens_pass(cache: str) -> None:
    check_exact([exact(cache), exact(cache, moved=0.05)], cache)


def test_with_fp8_a_token_may_be_another_one_that_is_as_good() -> None:
    check_exact([exact("packed", worse=0.5, other=True, margin=0.5)], "packed")


@pytest.mark.parametrize("cache", CLOSE)
@pytest.mark.parametrize(
    "wrong",
    [{"moved": 1.1}, {"moved": -1.1}, {"other": True}, {"worse": 1.1, "other": True, "margin": 0.5}],
    ids=["one token", "one token less", "a clear choice", "a choice"],
)
def test_more_than_rounding_does_not_pass(cache: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_exact([exact(cache), exact(cache, **wrong)], cache)


@pytest.mark.parametrize("cache", [cache for cache, (worst, mean) in CLOSE.items() if mean < worst])
def test_a_drift_of_all_tokens_does_not_pass(cache: str) -> None:
    with pytest.raises(AssertionError, match="on average"):
        check_exact([exact(cache, moved=0.9)], cache)


def test_where_two_tokens_are_as_good_nothing_can_be_said() -> None:
    with pytest.raises(AssertionError, match="two best continuations"):
        check_exact([exact("bfloat16", margin=1.0)], "bfloat16")
