"""One rank of two_gpu.py: measures one layout, and rank 0 writes what it found."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Part = tuple[str, Any]
REPEATS = 3
DECODES = 7
NEW = 64
UNEQUAL = (1, 5, 37, 150, 700, 1500, 2900, 6000)
BEGINNINGS, TAILS = (2900, 6000), (1, 300, 2000)


def main() -> None:
    """Do what the plan says."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {"versions": versions()}
    for part, value in link(plan) if plan["layout"] == "link" else engine(plan):
        found[part] = value
        if os.environ["RANK"] == "0":
            Path(plan["folder"], "result.json").write_text(json.dumps(found))


def versions() -> dict[str, str]:
    """Of what decides the figures."""
    import importlib.metadata

    installed = importlib.metadata.packages_distributions()
    names = [installed[name][0] for name in ("torch", "triton", "vllm") if name in installed]
    found = {name: importlib.metadata.version(name) for name in names}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def link(plan: dict[str, Any]) -> Iterator[Part]:
    """Time collectives by size; `rate` is what one rank receives a second."""
    import torch.distributed as dist

    rank, cuda = int(os.environ["RANK"]), plan["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    ranks = dist.get_world_size()
    rows = []
    for power in range(12, 30 if cuda else 22, 2):
        part = torch.ones(1 << power, dtype=torch.uint8, device=device).view(torch.bfloat16)
        whole = part.new_empty(ranks * len(part))
        received, to = (ranks - 1) * part.nbytes, torch.empty_like(part)
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "all_gather": (lambda part=part, whole=whole: dist.all_gather_into_tensor(whole, part), received),
            "reduce_scatter": (lambda part=part, whole=whole: dist.reduce_scatter_tensor(part, whole), received),
            "all_reduce": (lambda part=part: dist.all_reduce(part), 2 * received // ranks),
            "all_to_all": (lambda part=part, to=to: dist.all_to_all_single(to, part), received // ranks),
            "broadcast": (lambda part=part: dist.broadcast(part, 0), part.nbytes),
        }
        for what, (call, bytes_received) in calls.items():
            seconds = _repeated(call, device)
            rows.append({"what": what, "bytes": part.nbytes, "seconds": seconds, "rate": bytes_received / seconds})
    dist.destroy_process_group()
    yield "rows", rows


def _repeated(call: Callable[[], Any], device: torch.device, times: int = 20) -> float:
    """Seconds of one call, the median of some."""
    for _ in range(3):
        call()
    spans = []
    for _ in range(times):
        _wait_for(device)
        started = time.perf_counter()
        call()
        _wait_for(device)
        spans.append(time.perf_counter() - started)
    return statistics.median(spans)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def engine(plan: dict[str, Any]) -> Iterator[Part]:
    """Start the engine and measure it, part by part: a run that is cut short leaves what it has."""
    from vllm import LLM

    from atom_patches.bench import seeded_model

    size = seeded_model.SIZES[plan["size"]]
    seeded_model.register(size)
    longest = max(*plan["lengths"], *UNEQUAL, BEGINNINGS[-1] + TAILS[-1]) + NEW + 16
    model = seeded_model.write_config(size, Path(plan["folder"], f"model{os.environ['RANK']}"), longest)
    started = time.monotonic()
    llm = LLM(
        model=str(model), load_format=seeded_model.LOAD_FORMAT, skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_model_len=longest, max_num_batched_tokens=longest, max_num_seqs=16,
        distributed_executor_backend="external_launcher", enforce_eager=plan["eager"],
        max_logprobs=2, disable_log_stats=True, async_scheduling=False, **_platform(plan),
        **{"enable_prefix_caching": False, **plan["options"]},
    )  # fmt: skip
    yield "start", time.monotonic() - started
    _wait_for_turn(plan)
    split = "prefill_context_parallel_size" in plan["options"]
    modes = [_mode(name) for name in plan["modes"]] if split else [{}]
    if plan["options"].get("enable_prefix_caching"):
        yield "answers", _answers_from_the_cache(llm, size.vocab_size)
        return
    measured = []
    for mode in modes:
        measured.append(_prefill(llm, plan["lengths"], size.vocab_size, mode))
        yield "modes", measured
    if plan["trace"] is not None:
        _set(modes[0])
        for length in plan["lengths"]:
            _trace(llm, plan, _prompt(length, 0, size.vocab_size))
    _set({})
    yield "decode", {batch: _decode_step(llm, batch, size.vocab_size) for batch in (1, 16)}
    answers: dict[str, list[Any]] = {}
    for mode in modes:
        answers |= _answers(llm, plan["chunk"], size.vocab_size, mode)
        yield "answers", answers


def _wait_for_turn(plan: dict[str, Any]) -> None:
    """Engines that were started side by side are measured one after the other.

    Raises:
        RuntimeError: who started them is gone, killed without a chance to end them.
    """
    Path(plan["folder"], f"{plan['ready']}{os.environ['RANK']}").touch()
    parent = os.getppid()
    while not Path(plan["folder"], plan["turn"]).exists():
        if os.getppid() != parent:
            raise RuntimeError("the program that started this rank has ended")
        time.sleep(0.02)


def _mode(name: str) -> dict[str, str]:
    """The settings of a mode as the command line names it."""
    return {} if name == "auto" else dict(zip(("ATOM_PCP_GDN", "ATOM_PCP_ATTENTION"), name.split(":"), strict=True))


def _platform(plan: dict[str, Any]) -> dict[str, Any]:
    if plan["device"] == "cpu":
        return {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    # FlashInfer's kernels would be compiled first, for minutes.
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.85}
    if plan["cache_gib"] is not None:
        memory = {"kv_cache_memory_bytes": plan["cache_gib"] << 30, "gpu_memory_utilization": 0.05}
    return {
        "gdn_prefill_backend": "triton", "moe_backend": "triton", "enable_flashinfer_autotune": False, **memory,
    }  # fmt: skip


def _set(mode: dict[str, str]) -> None:
    """Take a mode for the next steps: all ranks do so between the same two."""
    for name in ("ATOM_PCP_GDN", "ATOM_PCP_ATTENTION"):
        os.environ.pop(name, None)
    os.environ.update(mode)


def _prompt(length: int, seed: int, vocabulary: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return {"prompt_token_ids": torch.randint(0, vocabulary, (length,), generator=generator).tolist()}


def _prefill(llm: Any, lengths: list[int], vocabulary: int, mode: dict[str, str]) -> dict[str, Any]:
    """Seconds from a request to its first token, by the prompt's length."""
    _set(mode)
    seconds = {}
    for length in lengths:
        spans = [_timed(llm, [_prompt(length, seed, vocabulary)], new=1) for seed in range(1 + REPEATS)]
        seconds[length] = statistics.median(spans[1:])
    return {"mode": " ".join(mode.values()) or "auto", "prefill": seconds}


def _trace(llm: Any, plan: dict[str, Any], prompt: dict[str, list[int]]) -> None:
    """Write what host and device did in one prefill, as Chrome's trace viewer reads it."""
    cuda = [torch.profiler.ProfilerActivity.CUDA] if plan["device"] == "cuda" else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda]) as profile:
        _generate(llm, [prompt], new=1)
    name = f"{plan['layout']}-{len(prompt['prompt_token_ids'])}-rank{os.environ['RANK']}.json.gz"
    profile.export_chrome_trace(str(Path(plan["trace"], name.replace(" ", "-"))))


def _decode_step(llm: Any, batch: int, vocabulary: int) -> float:
    """Seconds of a decode step."""
    prompts = [_prompt(1024, seed, vocabulary) for seed in range(batch)]
    spans = []
    for _ in range(1 + DECODES):
        first = _timed(llm, prompts, new=1)
        spans.append((_timed(llm, prompts, new=1 + NEW) - first) / NEW)
    return statistics.median(spans[1:])


def _timed(llm: Any, prompts: list[Any], new: int) -> float:
    started = time.perf_counter()
    _generate(llm, prompts, new)
    return time.perf_counter() - started


def _generate(llm: Any, prompts: list[Any], new: int, logprobs: int | None = None) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return llm.generate(prompts, params, use_tqdm=False)


def _answers(llm: Any, chunk: int, vocabulary: int, mode: dict[str, str]) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of unequal prompts in one mode, at once and in chunks."""
    prompts = [_prompt(length, 1, vocabulary) for length in UNEQUAL]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    at_once = scheduler.max_num_scheduled_tokens
    found = {}
    _set(mode)
    for name, rows in (("unequal", at_once), ("chunked", chunk)):
        scheduler.max_num_scheduled_tokens = rows
        label = f"{name}: {' '.join(mode.values())}" if mode else name
        found[label] = [_answer(output) for output in _generate(llm, prompts, 16, logprobs=2)]
    scheduler.max_num_scheduled_tokens = at_once
    return found


def _answers_from_the_cache(llm: Any, vocabulary: int) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of long prompts, and of longer ones that begin like them.

    Raises:
        RuntimeError: none of them was found in the cache.
    """
    first = [_prompt(length, 2, vocabulary) for length in BEGINNINGS]
    tails = [_prompt(length, 3, vocabulary)["prompt_token_ids"] for length in TAILS]
    longer = [{"prompt_token_ids": prompt["prompt_token_ids"] + tail} for prompt in first for tail in tails]
    answers = _generate(llm, first, 16, logprobs=2), _generate(llm, longer, 16, logprobs=2)
    if not all(output.num_cached_tokens for output in answers[1]):
        raise RuntimeError(f"found in the cache: {[output.num_cached_tokens for output in answers[1]]} tokens")
    named = zip(("new", "cached"), answers, strict=True)
    return {name: [_answer(output) for output in outputs] for name, outputs in named}


def _answer(output: Any) -> list[dict[str, float]]:
    """Token, its log-probability, and how much better it was than the next."""
    [sample] = output.outputs
    steps = []
    for token, ranked in zip(sample.token_ids, sample.logprobs, strict=True):
        best = sorted((one.logprob for one in ranked.values()), reverse=True)
        steps.append({"token": token, "logprob": ranked[token].logprob, "margin": best[0] - best[1]})
    return steps


if __name__ == "__main__":
    main()
