"""Answers that differ by rounding are told from answers that differ by more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.rounding import distance


def answer(tokens: list[int], logprobs: list[dict[str, float]], prompt: Any = ()) -> dict[str, Any]:
    """One request's answer, of one sample, as traffic.py gives it."""
    return {"samples": [{"tokens": tokens, "logprobs": logprobs}], "prompt_logprobs": list(prompt)}


LIKELY = [{"7": -0.1, "8": -2.5}, {"5": -0.70, "6": -0.71}, {"1": -0.2, "2": -1.9}]
EXPECTED = answer([7, 5, 1], LIKELY, [None, {"3": -1.0, "4": -2.0}])


def test_equal_answers() -> None:
    seen = distance([EXPECTED, None], [EXPECTED, None])
    assert (seen.worst, seen.mean, seen.forks) == (0, 0, [])
    assert (seen.tokens, seen.compared, len(seen.gaps)) == (3, 3, 8)


def test_what_follows_a_fork_is_not_compared() -> None:
    other = answer([7, 6, 9], [LIKELY[0], {"6": -0.70, "5": -0.72}, {"9": -9.0}], [None, {"3": -1.5, "9": -2.0}])
    seen = distance([other], [EXPECTED])
    assert seen.forks == [pytest.approx(0.01)]
    assert (seen.tokens, seen.compared) == (3, 2)
    assert seen.worst == pytest.approx(0.5) and len(seen.gaps) == 5


def test_a_fork_to_a_token_that_was_not_likely_counts_as_far() -> None:
    other = answer([9, 9, 9], [{"9": -0.1, "7": -0.2}] * 3, [None, {"3": -1.0}])
    # The expected engine names its likeliest only; the other's token is less likely than all of them.
    assert distance([other], [EXPECTED]).forks == [pytest.approx(2.4)]


@pytest.mark.parametrize("got", [[None], [answer([7, 5], LIKELY[:2], [None, {"3": -1.0}])]])
def test_missing_answers_are_no_rounding(got: list[Any]) -> None:
    with pytest.raises(AssertionError):
        distance(got, [EXPECTED])


def test_positions_without_a_common_token_are_no_rounding() -> None:
    with pytest.raises(AssertionError, match="not one token"):
        distance([answer([7, 5, 1], LIKELY, [None, {"9": -1.0}])], [EXPECTED])
