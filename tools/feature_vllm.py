"""Runs vLLM's engines of the feature matrix, and judges them."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_runs import Outcome, run_all
from feature_rows import ATOM, EQUAL, OWN, Case, env, like, options, ranks
from features import Engine
from pcp_differences import STEPS, answer_difference
from toolcache import ROOT

sys.path.insert(0, str(ROOT))
from tests.vllm import test_pcp_prompts as rich  # noqa: E402
from tests.vllm.gdn_oracle import CLOSE, environment, free_port, prompt, run_engines  # noqa: E402
from tests.vllm.pcp_engines import PATH, check_greedy, engine, launch, request, single  # noqa: E402
from tests.vllm.rich_oracle import PictureOracle  # noqa: E402
from tests.vllm.test_atom_models import LONG, PROMPTS  # noqa: E402

Plan = dict[str, Any]
Waves = list[list[dict[str, Any]]]
#: A case, what is not right of it, or `equal`, and whose decoder ran.
Ran = tuple[Case, str, str]
#: How many data-parallel engines share a launch.
SIZE = "data_parallel_size"
SETUP = "tests.vllm.seen_layers"
#: An engine with compilation takes longest.
SECONDS_EACH = 200


def run(declared: Engine, chosen: list[Case], folder: Path, say: Callable[[str], None]) -> Iterator[Ran]:
    """Each case, the result, and whose decoder ran."""
    models = _Models(declared, folder)
    right = {one: models.stock(one) for one in dict.fromkeys(like(declared, case) for case in chosen)}
    say(f"stock, on one rank: {len(right)} engines")
    references = run_all(folder, "stock", functools.partial(_launch, 1, 1, False), right, say)
    for group, cases in sorted(_groups(declared, chosen).items()):
        name = "{} ranks, {} engines, compiled {}".format(*group)
        say(f"{name}: {len(cases)} engines")
        plans = {case: models.ours(case) for case in cases}
        outcomes = run_all(folder, name.replace(" ", "_"), functools.partial(_launch, *group), plans, say)
        for case in cases:
            yield case, *_judged(declared, case, references[like(declared, case)], outcomes[case])


def _groups(declared: Engine, chosen: list[Case]) -> dict[tuple[int, int, bool], list[Case]]:
    """By ranks, data-parallel engines and compilation, the cases that can share processes."""
    groups: dict[tuple[int, int, bool], list[Case]] = {}
    for case in chosen:
        asked = options(declared, case)
        compiled = not asked.get("enforce_eager", True)
        groups.setdefault((ranks(declared, case), asked.get(SIZE, 1), compiled), []).append(case)
    return groups


class _Models:
    """Plans of engines; a checkpoint whose pictures are processed is copied once."""

    def __init__(self, declared: Engine, folder: Path) -> None:
        self._declared = declared
        self._folder = folder

    def stock(self, case: Case) -> Plan:
        """The engine that is compared with: on one rank, with vLLM's own decoder."""
        return self._plan(case, "")

    def ours(self, case: Case) -> Plan:
        return self._plan(case, "1")

    def _plan(self, case: Case, models: str) -> Plan:
        checkpoint = self._declared.family(case.family).checkpoint
        asked = options(self._declared, case)
        pictures = asked.get("language_model_only") is False
        settings = {**env(self._declared, case), "ATOM_MODELS": models}
        made = engine(checkpoint, [], env=settings, setup=SETUP, **asked)
        made["engines"] = waves(pictures, asked.get(SIZE, 1))
        return {**made, "model": self._seeing(checkpoint)} if pictures else made

    @functools.cache  # noqa: B019 - as long as the run
    def _seeing(self, checkpoint: str) -> str:
        return str(PictureOracle(checkpoint, self._folder / checkpoint).path)


def waves(pictures: bool, engines: int) -> list[Waves]:
    """For each engine, many requests at once, some with prompts scored; one; two that begin like it, or nothing."""
    many = [request(tokens) for tokens in PROMPTS]
    many += [request(prompt(length, seed=1), prompt_logprobs=2) for length in (37, 129)]
    many += rich.SEEN[0][:4] if pictures else []
    shared = [request(LONG[:140] + prompt(9, seed=4)), request(LONG)]
    if engines == 1:
        return [[many, [request(LONG)], shared]]
    return [[many[0::2], [request(LONG)], shared, []], [many[1::2], [], [], [request(PROMPTS[2])]]]


def _launch(world: int, engines: int, compiled: bool, folder: Path, plans: dict[Any, Plan]) -> dict[Any, list[Plan]]:
    """Results by case and rank."""
    seconds = 60 + len(plans) * SECONDS_EACH
    more = {"TORCHDYNAMO_DISABLE": "0"} if compiled else {}
    if engines > 1:
        return _data_parallel(world, engines, folder, plans, seconds, more)
    for plan in plans.values():
        [plan["waves"]] = plan["engines"]
        if plan["options"].get("tensor_parallel_size") == world > 1:
            # vLLM names the memory that ranks share by what follows the last colon of the address where they meet.
            plan["port"] = free_port()
            plan["options"]["distributed_executor_backend"] = "uni"
    if world > 1:
        return launch(folder, world, plans, seconds, **more)
    for plan in plans.values():
        plan["options"]["distributed_executor_backend"] = "uni"
    return {key: [result] for key, result in single(folder, plans, seconds, **more).items()}


def _data_parallel(
    world: int, engines: int, folder: Path, plans: dict[Any, Plan], seconds: float, more: dict[str, str]
) -> dict[Any, list[Plan]]:
    ports = {key: str(free_port()) for key in plans}
    by_rank: list[list[Plan]] = [[] for _ in range(world)]
    for key, plan in plans.items():
        asked = {**plan["options"], "distributed_executor_backend": "external_launcher"}
        settings = {**plan["env"], "MASTER_PORT": ports[key]}
        for rank, mine in enumerate(by_rank):
            own = plan["engines"][rank * engines // world]
            mine.append({**plan, "options": asked, "env": settings, "waves": own})
    envs = [
        environment(
            PYTHONPATH=PATH, ATOM_PCP_MIN_ROWS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", **more,
        )
        for rank in range(world)
    ]  # fmt: skip
    found = run_engines(folder, by_rank, envs, "dp_traffic.py", seconds)
    return {key: [result[index] for result in found] for index, key in enumerate(plans)}


def _judged(declared: Engine, case: Case, reference: Outcome, outcome: Outcome) -> tuple[str, str]:
    if isinstance(reference, str):
        return f"stock failed: {reference}", ""
    if isinstance(outcome, str):
        return f"failed: {outcome}", ""
    layers = {package for result in outcome for package in result["report"]["layers"]}
    decoder = {"atom_patches": ATOM, "vllm": OWN}.get("+".join(layers), "mixed")
    return next(_differences(declared, case, reference[0], outcome), EQUAL), decoder


def _differences(declared: Engine, case: Case, reference: Plan, results: list[Plan]) -> Iterator[str]:
    """What the ranks gave that they should not have, or did not do."""
    asked = options(declared, case)
    engines = asked.get(SIZE, 1)
    pictures = asked.get("language_model_only") is False
    checkpoint = declared.family(case.family).checkpoint
    [alone] = waves(pictures, 1)
    yield from _unlike_transformers("stock", checkpoint, alone, reference)
    right = {_key(one): answer for one, answer in _pairs(alone, reference)}
    for rank, result in enumerate(results):
        sent = waves(pictures, engines)[rank * engines // len(results)]
        yield from _unlike_transformers(f"rank {rank}", checkpoint, sent, result)
        for one, answer in _pairs(sent, result):
            expected = {**right[_key(one)], "cached": answer["cached"]}
            if found := answer_difference(expected, answer, 2 * CLOSE):
                yield f"rank {rank}, prompt of {len(one['prompt'])} tokens: {found}"
        yield from (f"rank {rank} {found}" for found in _unlike_asked(case, sent, result))


def _unlike_transformers(whose: str, checkpoint: str, sent: Waves, result: Plan) -> Iterator[str]:
    text = [pair for pair in _pairs(sent, result) if not pair[0].get("pictures")]
    try:
        check_greedy(checkpoint, [one for one, _ in text], [answer for _, answer in text])
    except AssertionError as error:
        yield f"{whose} differs from transformers: {str(error).splitlines()[0]}"


def _unlike_asked(case: Case, sent: Waves, result: Plan) -> Iterator[str]:
    """What equal answers would say nothing about."""
    if "prefix caching" in case.features and len(sent[2]) and not any(one["cached"] for one in result["waves"][2]):
        yield "found nothing in the prefix cache"
    if "PCP" in case.features and not _split(result):
        yield "split no step"


def _split(result: Plan) -> bool:
    if "passes" in result:
        return any("split" in passes for passes in result["passes"])
    return any(one["name"] == STEPS and one["labels"]["step"] == "split" and one["value"] for one in result["metrics"])


def _pairs(sent: Waves, result: Plan) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        pair
        for wave, answers in zip(sent, result["waves"], strict=True)
        for pair in zip(wave, answers, strict=True)
    ]  # fmt: skip


def _key(one: dict[str, Any]) -> str:
    return json.dumps([one["prompt"], one.get("pictures"), one["sampling"]])
