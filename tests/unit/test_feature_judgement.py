"""What the feature matrix calls different in what vLLM's engines gave."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import feature_vllm
import pytest
from feature_rows import ATOM, EQUAL, OWN, Case
from features import VLLM

IDLE = "data parallelism, idle ranks"
ALONE = Case("qwen3_next", ("prefix caching",))
SPREAD = Case("qwen3_next", (IDLE, "prefix caching"))
SPLIT = Case("qwen3_next", ("PCP",))


@pytest.fixture(autouse=True)
def no_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_vllm, "check_greedy", lambda *_: 0)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    tokens = [asked["prompt"][-1]] * asked["sampling"]["max_tokens"]
    logprobs = [{str(token): -0.5, "251": -1.5, "252": -2.5} for token in tokens]
    return {
        "samples": [{"tokens": tokens, "logprobs": logprobs, "finish": "length"}],
        "prompt_logprobs": [],
        "cached": 32,
    }


def result(waves: feature_vllm.Waves, package: str = "atom_patches") -> dict[str, Any]:
    answers = [[answer(one) for one in wave] for wave in waves]
    return {"waves": answers, "report": {"layers": {package: 4}}, "metrics": []}


def results(case: Case, package: str = "atom_patches") -> list[dict[str, Any]]:
    return [result(own, package) for own in feature_vllm.waves(False, 2 if IDLE in case.features else 1)]


def judged(case: Case, found: Any, reference: Any = None) -> tuple[str, str]:
    [alone] = feature_vllm.waves(False, 1)
    return feature_vllm._judged(VLLM, case, reference or [result(alone, "vllm")], found)


def test_equal_answers() -> None:
    assert judged(ALONE, results(ALONE)) == (EQUAL, ATOM)
    assert judged(ALONE, results(ALONE, "vllm")) == (EQUAL, OWN)
    assert judged(SPREAD, results(SPREAD)) == (EQUAL, ATOM)


def changes() -> Iterator[tuple[str, str, Any]]:
    def token(one: dict[str, Any]) -> None:
        one["waves"][0][1]["samples"][0]["tokens"][2] = 250

    def score(one: dict[str, Any]) -> None:
        one["waves"][1][0]["samples"][0]["logprobs"][0]["251"] = -1.6

    def cold(one: dict[str, Any]) -> None:
        for found in one["waves"][2]:
            found["cached"] = 0

    yield "token", "token 2 is 250", token
    yield "score", "log-probability of token 251 is off by 0.1", score
    yield "cold", "rank 0 found nothing in the prefix cache", cold


@pytest.mark.parametrize(("words", "change"), [pytest.param(*rest, id=name) for name, *rest in changes()])
def test_what_differs(words: str, change: Any) -> None:
    for case in (ALONE, SPREAD):
        found = copy.deepcopy(results(case))
        change(found[0])
        assert words in judged(case, found)[0]


def test_engines_that_fail_or_do_something_else() -> None:
    assert judged(ALONE, "ValueError: no") == ("failed: ValueError: no", "")
    assert judged(ALONE, results(ALONE), "ValueError: no") == ("stock failed: ValueError: no", "")
    assert judged(SPLIT, results(SPLIT, "vllm")) == ("rank 0 split no step", OWN)
    found = results(SPREAD)
    found[1]["report"]["layers"] = {"vllm": 4}
    assert judged(SPREAD, found) == (EQUAL, "mixed")


def test_an_engine_is_idle_while_the_other_is_at_work() -> None:
    first, second = feature_vllm.waves(False, 2)
    assert [(bool(one), bool(other)) for one, other in zip(first, second, strict=True)] == [
        (True, True), (True, False), (True, False), (False, True),
    ]  # fmt: skip
