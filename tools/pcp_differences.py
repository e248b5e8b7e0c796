"""How what the ranks of one engine gave differs from what the same engine gives without prefill context parallelism.

Works on the results that tests/vllm/traffic.py writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pcp_combos import NONE, Combo

Result = dict[str, Any]
Logprobs = list[dict[str, float] | None]

STEPS = "vllm:atom_pcp_steps"


def first_difference(waves: list[list[Any]], reference: Result, ranks: list[Result], close: float) -> str:
    """Where the ranks' results first differ from the reference's; empty: nowhere.

    Args:
        waves: the requests sent.
        reference: the result of one rank without prefill context parallelism.
        ranks: results by rank.
        close: by how much log-probabilities may differ.
    """
    for rank, result in enumerate(ranks):
        for found in itertools.chain(
            _answers(waves, reference, result, close),
            _counts(reference, result),
        ):
            return f"rank {rank}, {found}"
    return ""


def _answers(waves: list[list[Any]], reference: Result, result: Result, close: float) -> Iterator[str]:
    for number, wave in enumerate(zip(waves, reference["waves"], result["waves"], strict=True)):
        for index, (asked, expected, got) in enumerate(zip(*wave, strict=True)):
            if found := answer_difference(expected, got, close):
                yield f"wave {number}, request {index} (prompt of {len(asked['prompt'])} tokens): {found}"


def _counts(reference: Result, result: Result) -> Iterator[str]:
    if result["preemptions"] != reference["preemptions"]:
        yield f"preemptions: {result['preemptions']}, not {reference['preemptions']}"
    if result["free_after"] != result["free_before"]:
        yield f"free blocks: {result['free_before']} before, {result['free_after']} after"


def answer_difference(expected: Result | None, got: Result | None, close: float) -> str:
    """Where one request's results first differ; None is that of an aborted one."""
    if expected is None or got is None:
        return "" if expected is got else f"{'aborted' if got is None else 'finished'}, unlike the reference"
    if len(expected["samples"]) != len(got["samples"]):
        return f"{len(got['samples'])} samples, not {len(expected['samples'])}"
    for number, (one, other) in enumerate(zip(expected["samples"], got["samples"], strict=True)):
        if found := _sample_difference(one, other, close):
            return f"sample {number}: {found}"
    if found := _logprob_difference(expected["prompt_logprobs"], got["prompt_logprobs"], close):
        return f"prompt: {found}"
    if expected["cached"] != got["cached"]:
        return f"{got['cached']} tokens from the prefix cache, not {expected['cached']}"
    return ""


def _sample_difference(expected: Result, got: Result, close: float) -> str:
    for position, (one, other) in enumerate(itertools.zip_longest(expected["tokens"], got["tokens"])):
        if one != other:
            return f"token {position} is {other}, not {one}"
    if expected["finish"] != got["finish"]:
        return f"finished by {got['finish']}, not {expected['finish']}"
    return _logprob_difference(expected["logprobs"], got["logprobs"], close)


def _logprob_difference(expected: Logprobs, got: Logprobs, close: float) -> str:
    if len(expected) != len(got):
        return f"log-probabilities of {len(got)} positions, not {len(expected)}"
    for position, (one, other) in enumerate(zip(expected, got, strict=True)):
        if not one or not other:
            if bool(one) != bool(other):
                return f"position {position} has {'no ' * (not other)}log-probabilities, unlike the reference"
            continue
        # The least likely of the reported ones may be another token, by rounding; most are the same.
        both = one.keys() & other.keys()
        if 2 * len(both) <= len(one) or len(one) != len(other):
            return f"position {position} has log-probabilities of tokens {sorted(other)}, not {sorted(one)}"
        off, token = max((abs(one[token] - other[token]), token) for token in both)
        if off > close:
            return f"position {position}: log-probability of token {token} is off by {off:.2g}"
    return ""


def unlike_asked(combo: Combo, reference: Result, ranks: list[Result]) -> str:
    """What a combination was to do and did not: then equal results would say nothing. Empty: it did all."""
    if combo.case == "preemption" and not reference["preemptions"]:
        return "nothing was preempted"
    if combo.case == "prefix caching" and not any(one and one["cached"] for wave in reference["waves"] for one in wave):
        return "nothing was found in the prefix cache"
    for rank, result in enumerate(ranks):
        found = [metric["labels"] for metric in result["metrics"] if metric["name"] == STEPS and metric["value"]]
        split = [labels for labels in found if labels["step"] == "split"]
        if not split:
            return f"rank {rank} split no step"
        for labels in split:
            ran = Combo(combo.model, combo.ranks, combo.case, labels["gdn"], labels["attention"], labels["experts"])
            if not _as_asked(combo, ran):
                return f"rank {rank} ran {ran.settings}"
    return ""


def _as_asked(combo: Combo, ran: Combo) -> bool:
    gdn = ran.gdn != NONE if combo.gdn == "auto" else ran.gdn == combo.gdn
    return gdn and (ran.attention, ran.moe) == (combo.attention, combo.moe)
