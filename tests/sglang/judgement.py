"""What an engine's answers may differ by from those of transformers in float32 (oracle_worker.py).

In float32 every token is the oracle's. A KV cache in bfloat16 or FP8, which the oracle rounds like it
(sparse_oracle.py), can round a value to the other side, which moves what follows: the oracle itself, in float64, gets
0.0002 away on average with bfloat16, 0.001 at most, and 0.0009 and 0.015 with FP8. Without rounding it is 0.04 away
from FP8, on average.

In bfloat16 the weights themselves are rounded, and what layers hand on: there the log-probability of each token that
was generated is compared, after the same tokens, with how far transformers itself gets in bfloat16. An engine rounds in
other places, within its attention and its recurrence, too, which adds to the average: AVERAGE times as much is allowed.
No single token may be off by FURTHEST times what rounding does to a token (root mean square), nor be worse than the
oracle's best one by that much, which leaves room for near ties alone.

Seen with the tests' checkpoints: rounding moves a log-probability by 0.012 on average (root mean square 0.014 to
0.018), and by 2.5 to 4 times that at most; a wrong token was 0.01 to 0.07 worse, up to 4.5 times. One token of context
lost, the first or one in the middle: by 0.06 to 0.18 on average, 5 to 14 times as much, and by 0.37 to 1.1 at most, 21
to 64 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Verdict = dict[str, Any]
Answer = dict[str, Any]

#: In float32, by what the KV cache rounds to: how far log-probabilities of an engine and the oracle differ at most, and
#: on average. The oracle's tokens win by twice the former, but with FP8, where a token may be that much worse.
CLOSE = {"": (1.5e-4, 1.5e-4), "bfloat16": (4e-3, 1e-3), "packed": (0.06, 4e-3), "scaled": (0.06, 4e-3)}
FP8 = ("packed", "scaled")
#: In bfloat16, in units of what rounding does to transformers.
AVERAGE, FURTHEST = 2.0, 8.0


def check_exact(pairs: Sequence[tuple[Verdict, Answer]], cache: str = "") -> None:
    """Compare answers in float32, request by request."""
    worst, mean = CLOSE[cache]
    for verdict, answer in pairs:
        clear = verdict["margin"] > 2 * worst
        assert clear or cache in FP8, f"a prompt has two best continuations: {verdict}"
        assert answer["tokens"] == verdict["greedy"] or not clear, f"{answer['tokens']} are not the tokens of {verdict}"
        worse = [best - own for best, own in zip(verdict["best"], verdict["logprobs"], strict=True)]
        assert max(worse) < worst, f"a token is worse than the best one by {max(worse)}"
    apart = _apart(pairs, "logprobs")
    said = f"log-probabilities differ by {_mean(apart):.6f} on average and {max(apart):.6f} at most"
    print(said)
    assert max(apart) < worst, said
    assert _mean(apart) < mean, said


def check_rounded(pairs: Sequence[tuple[Verdict, Answer]]) -> None:
    """Compare answers in bfloat16."""
    apart = _apart(pairs, "logprobs")
    rounding = [abs(a - b) for one, _ in pairs for a, b in zip(one["rounded"], one["logprobs"], strict=True)]
    worse = [best - own for one, _ in pairs for best, own in zip(one["best"], one["logprobs"], strict=True)]
    usual = (sum(x * x for x in rounding) / len(rounding)) ** 0.5
    said = (
        f"{len(apart)} tokens: log-probabilities differ by {_mean(apart):.4f} on average and {max(apart):.4f} at most, "
        f"in transformers by {_mean(rounding):.4f} and {max(rounding):.4f}; {sum(x > 0 for x in worse)} tokens are not "
        f"the best, by up to {max(worse):.4f}; allowed: {AVERAGE * _mean(rounding):.4f}, {FURTHEST * usual:.4f}"
    )
    print(said)
    assert _mean(apart) < AVERAGE * _mean(rounding), said
    assert max(apart) < FURTHEST * usual, said
    assert max(worse) < FURTHEST * usual, said


def _apart(pairs: Sequence[tuple[Verdict, Answer]], of: str) -> list[float]:
    return [abs(a - b) for verdict, answer in pairs for a, b in zip(answer[of], verdict[of], strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
