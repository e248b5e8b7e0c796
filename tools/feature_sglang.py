"""Runs SGLang's engines of the feature matrix, and judges them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from feature_rows import ATOM, EQUAL, OWN, Case, env, like, options
from features import Engine
from toolcache import ROOT

sys.path.insert(0, str(ROOT))
from tests.sglang import probed, test_sparse_mla  # noqa: E402
from tests.sglang.engines import Engine as Plan  # noqa: E402
from tests.sglang.engines import Outcome, Wave, engine, launch, prompt  # noqa: E402
from tests.sglang.judgement import CLOSE  # noqa: E402

SPARSE = "deepseek_v32"
Answers = dict[str, dict[str, Any]]
#: A case, what is not right of it, or `equal`, and whose decoder ran.
Ran = tuple[Case, str, str]


def run(declared: Engine, chosen: list[Case], folder: Path, say: Callable[[str], None]) -> Iterator[Ran]:
    """Each case, the result, and whose decoder ran. Family by family, since each has an oracle to be loaded."""
    for family, group in itertools.groupby(sorted(chosen, key=lambda case: case.family), lambda case: case.family):
        cases = list(group)
        say(f"{family}: {len(cases)} engines")
        for case, found in _family(declared, cases, folder / family).items():
            yield case, *found


def _family(declared: Engine, cases: list[Case], folder: Path) -> dict[Case, tuple[str, str]]:
    names = {case: f"engine {number}" for number, case in enumerate(cases)}
    plans = {name: probed.atom(name, folder, plan(declared, case)) for case, name in names.items()}
    stock = {case: like(declared, case) for case in cases}
    plans |= {f"stock {one}": plan(declared, one, stock=True) for one in dict.fromkeys(stock.values())}
    ended = launch(folder, plans)
    return {case: _judged(case, ended, name, f"stock {stock[case]}") for case, name in names.items()}


def plan(declared: Engine, case: Case, stock: bool = False) -> Plan:
    """The engine of a case, or of one that is compared with: with SGLang's own decoder."""
    asked = options(declared, case)
    spread = "dp_size" in asked
    sparse = case.family == SPARSE
    rounds = any(declared.feature(name).in_stock for name in case.features)
    # Its attention to selected tokens is this package's, whoever's the decoder.
    plugin = {"SGLANG_PLUGINS": "atom"} if sparse or not stock else {}
    return engine(
        declared.family(case.family).checkpoint,
        waves(sparse, spread),
        env(declared, case) | plugin,
        cache=("packed" if rounds else "bfloat16") if sparse else "",
        **asked,
    )


def waves(sparse: bool, spread: bool) -> list[Wave]:
    """Those of the tests, and then one that goes on from a prompt of the last wave, on its rank: for the prefix cache.

    Of a hybrid, the cache has states only where prompts ended.
    """
    found = test_sparse_mla.waves(spread) if sparse else probed.waves(spread)
    first = found[-1][0]
    return [*found, [{**first, "prompt": [*first["prompt"], *prompt(9, 4)]}]]


def _judged(case: Case, ended: Any, name: str, stock: str) -> tuple[str, str]:
    try:
        expected, got = ended[stock], ended[name]
    except AssertionError as error:
        return f"failed: {_cause(str(error))}", ""
    decoder = ATOM if all(rank.model.startswith(probed.SHELLS) for rank in got.ranks) else OWN
    return next(_differences(case, expected, got), EQUAL), decoder


def _differences(case: Case, expected: Outcome, got: Outcome) -> Iterator[str]:
    """What the engine gave that it should not have, or did not do."""
    # The oracle rounds like a KV cache in FP8 where attention is sparse; elsewhere the engine's own is the judge.
    rounded = got.plan.options.get("kv_cache_dtype") == "fp8_e4m3"
    if case.family == SPARSE or not rounded:
        yield from _unlike_transformers("stock", expected)
        yield from _unlike_transformers("this engine", got)
    right = _by_prompt(expected)
    worst, mean = CLOSE["scaled" if rounded else got.plan.cache]
    apart: list[float] = []
    for asked, answer in _by_prompt(got).items():
        if answer["tokens"] != right[asked]["tokens"]:
            yield f"a prompt of {asked.count(',') + 1} tokens goes on with {answer['tokens']}, not as with stock"
        apart += [abs(a - b) for a, b in zip(answer["logprobs"], right[asked]["logprobs"], strict=True)]
    if max(apart) > 2 * worst or sum(apart) > 2 * mean * len(apart):
        average = sum(apart) / len(apart)
        yield f"log-probabilities differ from stock's by {max(apart):.2g} at most and {average:.2g} on average"
    if "prefix caching" in case.features and not any(answer["cached"] for answer in got.answers[-1]):
        yield "nothing was found in the prefix cache"
    if "dp_size" in got.plan.options and not all("IDLE" in rank.modes for rank in got.ranks):
        yield "some rank was never idle"


def _unlike_transformers(whose: str, outcome: Outcome) -> Iterator[str]:
    try:
        outcome.check()
    except AssertionError as error:
        yield f"{whose} differs from transformers: {str(error).splitlines()[0]}"


def _by_prompt(outcome: Outcome) -> Answers:
    pairs = zip(itertools.chain(*outcome.plan.waves), itertools.chain(*outcome.answers), strict=True)
    return {str(asked["prompt"]): answer for asked, answer in pairs}


def _cause(log: str) -> str:
    """The last line that names an error; else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])
