"""Under prefill context parallelism prompts with pictures, and prompts of embeddings, give what transformers gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.gdn_oracle import CLOSE, Oracle, oracle, prompt
from tests.vllm.pcp_engines import NEW, Engine, engine, launch, log_of, request, samples, single
from tests.vllm.pcp_waves import CACHING, CHUNKED
from tests.vllm.rich_oracle import IMAGE, PLAYED, SHOWN, Answer, PictureOracle, embedded, embeddings
from tests.vllm.rich_prompts import Clip, Picture
from tests.vllm.test_pcp import asked_for

SETUP = "tests.vllm.rich_prompts"
TWO_PASS = {"ATOM_PCP_GDN": "two_pass", "ATOM_PCP_ATTENTION": "zigzag", "ATOM_PCP_DEBUG": "1"}
Request = dict[str, Any]
Results = dict[str, list[dict[str, Any]]]
Seeing = Callable[[str], PictureOracle]
Spelled = Callable[[str], list[Request]]

WIDE, TALL, LARGE, SMALL = (1, 160, 96), (2, 64, 192), (3, 256, 192), (4, 64, 64)
#: Prompts of text, and of text with pictures of 4 to 48 tokens: at the beginning, at the end, two of them.
AROUND = (prompt(9, seed=70), prompt(30, seed=71))


def shown(
    tokens: tuple[int, ...], *pictures: Picture, clips: Sequence[Clip] = (), at: int = 0, **sampling: Any
) -> Request:
    """A request with pictures or clips."""
    return {**request(tokens, at, **sampling), "pictures": list(pictures), "clips": list(clips)}


SEEN: list[list[Request]] = [
    [
        shown(AROUND[0] + SHOWN + AROUND[1], WIDE),
        shown(SHOWN + AROUND[0] + SHOWN + prompt(3, seed=72), LARGE, SMALL),
        request(prompt(37, seed=73)),
        shown(prompt(90, seed=74) + SHOWN, TALL),
        shown(prompt(150, seed=75) + SHOWN + prompt(5, seed=76), LARGE, at=2),
        request(prompt(1, seed=30), at=3),
        shown(SHOWN + prompt(2, seed=77), SMALL, at=4, max_tokens=1),
    ],
    [
        shown(AROUND[0] + SHOWN + AROUND[1], (7, *LARGE[1:]), prompt_logprobs=2),
        request(prompt(33, seed=50), prompt_logprobs=2),
    ],
]
#: A clip of three pictures in time, and one with a picture before it.
SEEN.append(
    [
        shown(AROUND[0] + PLAYED + AROUND[1], clips=[(8, 64, 96, 6)]),
        shown(SHOWN + AROUND[0] + PLAYED, SMALL, clips=[(20, 96, 96, 2)], at=1),
    ]
)
#: Pictures in a prefix that is sent again, goes on differently, and comes with another picture at its place.
STARTED = prompt(20, seed=80) + SHOWN + prompt(30, seed=81)
CACHED: list[list[Request]] = [
    [shown(STARTED + prompt(40, seed=82), LARGE)],
    [
        shown(STARTED + prompt(40, seed=82), LARGE),
        shown(STARTED + prompt(41, seed=83), LARGE),
        shown(STARTED + prompt(40, seed=82), (5, *LARGE[1:])),
    ],
]
EMBEDDED = [(37, 0), (150, 0), (2, 0), (90, 2), (64, 3)]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    made: dict[str, PictureOracle] = {}

    def find(name: str) -> PictureOracle:
        if name not in made:
            made[name] = PictureOracle(name, tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return find


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Spelled:
    """Requests with embeddings of one model, and others with token ids among them."""
    folder = tmp_path_factory.mktemp("embeddings")

    def make(name: str) -> list[Request]:
        made = [request(prompt(41, seed=90)), request(prompt(5, seed=91), at=2)]
        for length, at in EMBEDDED:
            path = folder / f"{name}{length}.pt"
            torch.save(embeddings(oracle(name), prompt(length, seed=92)), path)
            made.append({**request((), at), "embeddings": str(path)})
        return made

    return make


def worker_engines(seeing: Seeing, spelled: Spelled) -> dict[str, Engine]:
    """Engines whose ranks are vLLM's own worker processes: two by two with an encoder cut by pictures, and two."""
    two: dict[str, Any] = {"prefill_context_parallel_size": 2, "distributed_executor_backend": "mp"}
    # Workers would process a picture to profile the encoder, and `setup` reaches this process only.
    grid = dict(tensor_parallel_size=2, mm_encoder_tp_mode="data", skip_mm_profiling=True)
    seen = engine("qwen3_5", SEEN, language_model_only=False, setup=SETUP, **CHUNKED, **grid, **two)
    return {
        "qwen3_5 grid": {**seen, "model": str(seeing("qwen3_5").path)},
        "qwen3 workers": engine("qwen3", [spelled("qwen3")], enable_prompt_embeds=True, **two),
    }


def engines(size: dict[str, int], seeing: Seeing, spelled: Spelled) -> dict[str, Engine]:
    """One engine for each model and kind of prompt."""

    def sees(name: str, waves: list[list[Request]], **more: Any) -> Engine:
        plan = engine(name, waves, language_model_only=False, setup=SETUP, **more, **size)
        return {**plan, "model": str(seeing(name).path)}

    def takes(name: str, **more: Any) -> Engine:
        return engine(name, [spelled(name)], enable_prompt_embeds=True, **more, **size)

    return {
        "qwen3_5 pictures": sees("qwen3_5", SEEN),
        "qwen3_5 pictures chunked": sees("qwen3_5", SEEN, env=TWO_PASS, **CHUNKED),
        "qwen3_5 pictures caching": sees("qwen3_5", CACHED, **CACHING),
        "qwen3_5_moe pictures": sees("qwen3_5_moe", SEEN, **CHUNKED),
        "qwen3_vl pictures": sees("qwen3_vl", SEEN),
        "qwen3_vl pictures chunked": sees("qwen3_vl", SEEN, **CHUNKED),
        "qwen3 embeddings": takes("qwen3"),
        "qwen3_next embeddings": takes("qwen3_next", env=TWO_PASS, **CHUNKED),
    }


KEYS = (
    "qwen3_5 pictures",
    "qwen3_5 pictures chunked",
    "qwen3_5 pictures caching",
    "qwen3_5_moe pictures",
    "qwen3_vl pictures",
    "qwen3_vl pictures chunked",
    "qwen3 embeddings",
    "qwen3_next embeddings",
)


@pytest.fixture(scope="module")
def unsplit(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seeing: Seeing, spelled: Spelled
) -> dict[str, dict[str, Any]]:
    plans = asked_for(request, engines({}, seeing, spelled))
    for plan in plans.values():
        plan["options"]["distributed_executor_backend"] = "uni"
    return single(tmp_path_factory.mktemp("unsplit"), plans)


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folder_of_two: Path, seeing: Seeing, spelled: Spelled) -> Results:
    plans = engines({"prefill_context_parallel_size": 2}, seeing, spelled)
    return launch(folder_of_two, 2, asked_for(request, plans), ATOM_PCP_GDN="relay")


@pytest.fixture(scope="module")
def three(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seeing: Seeing, spelled: Spelled
) -> Results:
    plans = engines({"prefill_context_parallel_size": 3}, seeing, spelled)
    return launch(tmp_path_factory.mktemp("three"), 3, asked_for(request, plans), ATOM_PCP_GDN="relay")


@pytest.fixture(scope="module")
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seeing: Seeing, spelled: Spelled
) -> dict[str, dict[str, Any]]:
    plans = asked_for(request, worker_engines(seeing, spelled))
    return single(tmp_path_factory.mktemp("workers"), plans, VLLM_CPU_OMP_THREADS_BIND="0|1|0|1", ATOM_PCP_GDN="relay")


def expected(name: str, asked: Request, seeing: Seeing) -> tuple[int, Answer]:
    """Rows of the prompt, and what transformers answers."""
    new = asked["sampling"]["max_tokens"]
    if "embeddings" in asked:
        rows = torch.load(asked["embeddings"])
        return len(rows), embedded(oracle(name), rows, new)
    tokens = tuple(asked["prompt"])
    if "pictures" not in asked:
        return len(tokens), oracle(name).answer(tokens, new)
    model, pictures = seeing(name), (*asked["pictures"], *asked["clips"])
    return model.inputs(tokens, pictures)[0].shape[1], model.seen(tokens, pictures, new)


def check_close(reported: list[dict[str, float]], logprobs: torch.Tensor) -> None:
    """Every reported log-probability is the oracle's, and there are several at each position."""
    for position, values in enumerate(reported):
        assert len(values) > 1
        for token, value in values.items():
            assert abs(value - logprobs[position, int(token)].item()) < CLOSE, (position, token)


def check(key: str, plan: Engine, result: dict[str, Any], reference: dict[str, Any], seeing: Seeing) -> None:
    """One rank of one engine gives what transformers gives, and hits the cache as the unsplit engine does."""
    for sent, got, before in zip(plan["waves"], result["waves"], reference["waves"], strict=True):
        for asked, answer in zip(sent, got, strict=True):
            rows, (chosen, logprobs) = expected(key.split()[0], asked, seeing)
            [sample] = answer["samples"]
            assert sample["tokens"] == chosen, f"a prompt of {rows} rows"
            check_close(sample["logprobs"], logprobs[rows - 1 :])
            if "prompt_logprobs" in asked["sampling"]:
                assert len(answer["prompt_logprobs"]) == rows
                check_close(answer["prompt_logprobs"][1:], logprobs)
        assert samples(got) == samples(before)
        assert [answer["cached"] for answer in got] == [answer["cached"] for answer in before]
    assert result["free_after"] == result["free_before"], "blocks leaked"


@pytest.mark.parametrize("key", KEYS)
def test_one_rank(unsplit: dict[str, dict[str, Any]], seeing: Seeing, spelled: Spelled, key: str) -> None:
    check(key, engines({}, seeing, spelled)[key], unsplit[key], unsplit[key], seeing)


@pytest.mark.parametrize("key", KEYS)
def test_two_ranks(
    two: Results, unsplit: dict[str, dict[str, Any]], seeing: Seeing, spelled: Spelled, key: str
) -> None:
    for result in two[key]:
        check(key, engines({}, seeing, spelled)[key], result, unsplit[key], seeing)


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS)
def test_three_ranks(
    three: Results, unsplit: dict[str, dict[str, Any]], seeing: Seeing, spelled: Spelled, key: str
) -> None:
    for result in three[key]:
        check(key, engines({}, seeing, spelled)[key], result, unsplit[key], seeing)


@pytest.mark.long
@pytest.mark.parametrize("key", ["qwen3_5 grid", "qwen3 workers"])
def test_workers(workers: dict[str, dict[str, Any]], seeing: Seeing, spelled: Spelled, key: str) -> None:
    check(key, worker_engines(seeing, spelled)[key], workers[key], workers[key], seeing)


@pytest.mark.parametrize("key", ["qwen3_5 pictures chunked"])
def test_pictures_are_cut_apart(two: Results, folder_of_two: Path, key: str) -> None:
    """Chunks and slices cut the 48 rows of a picture, which therefore lie in several steps and on both ranks."""
    log = log_of(folder_of_two, two, key, 0)
    assert "runs 24 rows of 48 (0 replicated, pool rows [0, 24), 0 padded)" in log


@pytest.mark.parametrize("key", ["qwen3_5 pictures caching"])
def test_pictures_in_a_prefix_are_told_apart(two: Results, key: str) -> None:
    """The same prompt hits the cache, and the same tokens with another picture hit only what stands before it."""
    again, longer, another = (answer["cached"] for answer in two[key][0]["waves"][1])
    assert again > 0 and longer > 0 and another < longer


def test_positions_differ_by_axis(seeing: Seeing) -> None:
    """Rows of a picture have a position for time, height and width, so that one axis for all would be found out."""
    positions = seeing("qwen3_5").positions(AROUND[0] + SHOWN + AROUND[1], (WIDE,))
    time, height, width = positions[:, 10:25]
    assert not time.equal(height) and not height.equal(width) and not time.equal(width)


def test_pictures_matter(seeing: Seeing) -> None:
    """Another picture of the same size gives another answer."""
    model: Oracle = seeing("qwen3_5")
    assert isinstance(model, PictureOracle) and IMAGE in SHOWN
    tokens = AROUND[0] + SHOWN + AROUND[1]
    one, other = (model.seen(tokens, ((seed, *WIDE[1:]),), NEW) for seed in (1, 6))
    assert one[0] != other[0] or (one[1][-1] - other[1][-1]).abs().max() > 100 * CLOSE
