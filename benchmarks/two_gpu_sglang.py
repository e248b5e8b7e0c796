"""Data-parallel attention under uneven load: SGLang servers on the ATOM decoders, and every token that of one GPU.

    python benchmarks/two_gpu.py sglang --ranks 2 --json sglang.json        # one layout after the other
    python benchmarks/two_gpu.py sglang --device cpu --requests 60 --limit 1500
    python benchmarks/two_gpu.py report sglang.json

Each layout is one server, which answers one burst of requests after the other:

    alone    one rank has requests, all others have none
    crowd    most requests are one rank's, few are others': short and in chunks, of one token and aborted among them
    meeting  one rank decodes when the prompt of another comes

The model is tests/assets/recall. Its answers are known, and win by far more than rounding to bfloat16 moves them, so
tokens are compared to the letter. A run fails where a request is not answered, a token is another than one GPU's, a
rank was never idle, or did not run an ATOM decoder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from atom_patches.bench.server import HERE, Server, ServerError, running  # noqa: E402

MODEL = ROOT / "tests" / "assets" / "recall"
#: Experts are cut over all ranks, or dealt out: the exchange is SGLang's own, without a package for it.
LAYOUTS: dict[str, dict[str, bool]] = {"one": {}, "tp": {"spread": True}, "ep": {"spread": True, "dealt": True}}
#: With this one transformers in bfloat16 gets all 2,000 answers right, and the closest token's log-probability is 1.7
#: above the next one's, 2.5 with 4 ranks. Of other prompts the model gets about one in 2,000 wrong, or nearly.
SEED = 1
#: Of each rank; SGLang divides what it is given by the ranks of data-parallel attention.
RUNNING, CHUNK, STATES = 16, 128, 64
#: Requests in flight.
AT_ONCE = 64
#: Tokens that an aborted request asks for: more than it can get before it is aborted.
ENDLESS = 200
#: Seconds of a few steps: how far apart in a burst requests come, and are aborted.
PACE = {"cuda": 0.01, "cpu": 0.1}
#: Seconds without an answer that count as a hang. Kernels may be compiled meanwhile.
STALL = {"cuda": 90.0, "cpu": 400.0}
LOG = 20_000

Found = dict[str, Any]


class HangError(RuntimeError):
    """No request was answered for a long time, or not all in time."""


@dataclass(frozen=True)
class Request:
    """A prompt, how its answer goes on for as long as that is known, the tokens to generate, and the rank to do so.

    `at` and `abort` are times after the burst's beginning and after the sending, in units of PACE.
    """

    prompt: list[int]
    answer: list[int]
    new: int
    rank: int
    at: float = 0.0
    abort: float | None = None


Burst = list[Request]


def add_options(command: argparse.ArgumentParser) -> None:
    """What the command takes beside device, result and limit."""
    command.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    command.add_argument("--ranks", type=int, default=2, help="GPUs of a layout but `one`")
    command.add_argument("--requests", type=int, default=2000)
    command.add_argument("--stall", type=float, help="seconds without an answer that count as a hang")


def main(options: argparse.Namespace) -> list[Found]:
    """Run one layout after the other; what was found so far is always in the file."""
    signal.signal(signal.SIGTERM, _interrupted)  # so that servers are ended on the way out
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _check_gpus(options)
    results: list[Found] = []
    for layout in options.layouts:
        results.append({"layout": label(layout, options.ranks)})
        _run(options, layout, results[-1], lambda: options.json.write_text(json.dumps(results)))
    return results


def label(layout: str, ranks: int) -> str:
    """The layout's name in results."""
    return "sglang one" if layout == "one" else f"sglang dp{ranks} {layout}{ranks}"


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _check_gpus(options: argparse.Namespace) -> None:
    from tests.sglang.environment import gpus

    if options.ranks < 2:
        raise SystemExit("--ranks: two at least, else no rank can be idle while another works")
    needed = max(_size(options, layout) for layout in options.layouts)
    if options.device == "cuda" and gpus() < needed:
        raise SystemExit(f"--ranks {options.ranks}: torch finds {gpus()} GPUs here")


def _size(options: argparse.Namespace, layout: str) -> int:
    """The layout's ranks."""
    return options.ranks if LAYOUTS[layout].get("spread") else 1


def traffic(requests: int, ranks: int) -> list[Burst]:
    """The bursts, the same for each layout; each rank in turn has most of the work."""
    rng, bursts, left = random.Random(SEED), list[Burst](), requests
    for hot in itertools.cycle(range(ranks)):
        for make in (_alone, _crowd, _meeting):
            bursts.append(make(rng, hot, ranks)[:left])
            left -= len(bursts[-1])
            if not left:
                return bursts
    raise AssertionError


def _alone(rng: random.Random, hot: int, ranks: int) -> Burst:
    return [_request(rng, hot) for _ in range(rng.randint(1, 3))]


def _crowd(rng: random.Random, hot: int, ranks: int) -> Burst:
    burst: Burst = []
    for _ in range(rng.randint(12, 40)):
        one = _request(rng, hot if rng.random() < 0.85 else _other(rng, hot, ranks), at=rng.choice([0.0, 0.0, 3.0]))
        if rng.random() < 0.06:
            one = dataclasses.replace(one, new=ENDLESS, abort=rng.uniform(0.5, 15))
        burst.append(one)
    return burst


def _meeting(rng: random.Random, hot: int, ranks: int) -> Burst:
    first = _request(rng, hot)
    later = _request(rng, _other(rng, hot, ranks), at=rng.uniform(1, 8))
    return [dataclasses.replace(first, new=len(first.answer)), later]


def _other(rng: random.Random, hot: int, ranks: int) -> int:
    return (hot + rng.randrange(1, ranks)) % ranks


def _request(rng: random.Random, rank: int, at: float = 0.0) -> Request:
    """One of about 20 to 300 tokens; every seventh answer has one token."""
    from train_recall import STAGES, make_prompt

    prompt = make_prompt(rng.choice(STAGES), rng)
    new = 1 if rng.random() < 1 / 7 else rng.randint(2, len(prompt.answer))
    return Request(prompt.tokens, prompt.answer, new, rank, at)


def _run(options: argparse.Namespace, layout: str, found: Found, save: Callable[[], Any]) -> None:
    """Serve one layout; `failed` says what was wrong, or why it came no further."""
    bursts = traffic(options.requests, options.ranks)
    found["traffic"] = hashlib.sha256(repr(bursts).encode()).hexdigest()[:12]
    found["asked"] = options.requests
    save()
    deadline = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The server is ended before the threads that wait for it are joined.
        with ThreadPoolExecutor(AT_ONCE) as pool, _serving(options, layout, folder) as server:
            load = Load(options, layout, server, pool, deadline, found, save)
            try:
                load.start()
                load.send_all(bursts)
                load.look(folder)
            except (ServerError, HangError, subprocess.SubprocessError) as error:
                found["failed"] = str(error)
                _look_at_the_hung(found, server, folder)
                found["log"] = server.log.read_text(errors="replace")[-LOG:]
                print(f"{found['layout']}: {found['failed']}\n{found['log']}", flush=True)
        log = server.log.read_text(errors="replace")
        found["graphs"] = Counter(re.findall(r"Decode batch.*cuda graph: (\w+)", log))
    if "failed" not in found and (faults := list(_faults(found, options, layout))):
        found["failed"] = "; ".join(faults)
    save()


@contextlib.contextmanager
def _serving(options: argparse.Namespace, layout: str, folder: Path) -> Iterator[Server]:
    """A server with the overlay, real SGLang on the GPUs; with --device cpu on the tests' stand-in."""
    from tests.sglang.engines import PORTS, reserved_ports
    from tests.sglang.environment import environment
    from tests.sglang.environment import options as engine_options

    for part in ("states", "steps"):
        (folder / part).mkdir(mode=0o700)
    env = environment(
        SGLANG_PLUGINS="atom", ATOM_MODELS="1",
        ATOM_PATCHES_STATE_DIR=str(folder / "states"), SGLANG_STEPS=str(folder / "steps"),
    )  # fmt: skip
    with reserved_ports() as port:
        wanted = engine_options(
            model_path=MODEL, host="127.0.0.1", port=port, nccl_port=port + PORTS - 2, **_options(options, layout)
        )
        command = [sys.executable, "-m", "sglang.launch_server"]
        for option, value in wanted.items():
            flag = f"--{option.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        with running(layout, command, port, env, folder) as server:
            yield server


def _options(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    ranks = _size(options, layout)
    wanted: dict[str, Any] = {
        "max_running_requests": RUNNING * ranks, "chunked_prefill_size": CHUNK * ranks,
        "max_mamba_cache_size": STATES * ranks, "max_total_tokens": 16384, "skip_server_warmup": True,
        "log_level": "info", "log_level_http": "warning",
        # SGLang's own all-reduce and gather of logits use symmetric memory, and multicast where the host has it; logits
        # in float32 it leaves to NCCL.
        "disable_custom_all_reduce": True, "enable_fp32_lm_head": True,
    }  # fmt: skip
    if options.device == "cuda":
        wanted["cuda_graph_max_bs_decode"] = RUNNING
    if ranks > 1:
        wanted |= {"tp_size": ranks, "dp_size": ranks, "enable_dp_attention": True}
    if LAYOUTS[layout].get("dealt"):
        wanted["ep_size"] = ranks
    return wanted


@dataclass
class Load:
    """One server's load, and what is found meanwhile."""

    options: argparse.Namespace
    layout: str
    server: Server
    pool: ThreadPoolExecutor
    deadline: float
    found: Found
    save: Callable[[], Any]

    def start(self) -> None:
        """Wait for the server, and have it run once what it is to run: kernels are compiled then."""
        began = time.monotonic()
        self.server.wait(lambda: None, limit=self._left())
        rng = random.Random(SEED + 1)
        ranks = range(self.options.ranks)
        for burst in (*([_request(rng, rank) for _ in range(3)] for rank in ranks), [_request(rng, r) for r in ranks]):
            self._send(burst, 0, [{} for _ in burst], stall=self._left())
        self.found["start"] = round(time.monotonic() - began, 1)

    def send_all(self, bursts: list[Burst]) -> None:
        """Send one burst after the other.

        Raises:
            HangError: answers stay away.
            ServerError: the server has ended.
        """
        began = shown = time.monotonic()
        answers: list[Found] = []
        self.found["requests"] = answers
        for burst in bursts:
            answers += [{} for _ in burst]
            first = len(answers) - len(burst)
            try:
                self._send(burst, first, answers[first:], self.options.stall or STALL[self.options.device])
            finally:
                self.found["seconds"] = round(time.monotonic() - began, 2)
                self.save()
            if time.monotonic() > shown + 10:
                shown = time.monotonic()
                print(f"{self.found['layout']}: {_answered(self.found):,} answered", flush=True)

    def _send(self, burst: Burst, first: int, answers: list[Found], stall: float) -> None:
        """Send a burst, and wait for its answers."""
        left: set[Future[None]] = {
            self.pool.submit(self._ask, request, f"{first + i:06}", answers[i]) for i, request in enumerate(burst)
        }
        while left:
            done, left = wait(left, timeout=min(stall, self._left()), return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            self.server.check()
            if not done:
                late = self.deadline <= time.monotonic()
                why = f"limit of {self.options.limit:.0f} s reached" if late else f"no answer for {stall:g} s"
                raise HangError(f"{why}: {_answered(self.found):,} of {self.options.requests:,} answered")

    def _ask(self, request: Request, name: str, answer: Found) -> None:
        """Fill in the answer to one request."""
        pace = PACE[self.options.device]
        time.sleep(pace * request.at)
        body = {"input_ids": request.prompt, "rid": name, "return_logprob": True, "top_logprobs_num": 2}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True}
        if LAYOUTS[self.layout].get("spread"):
            body["routed_dp_rank"] = request.rank
        abort = threading.Timer(pace * (request.abort or 0), self._abort, [name])
        if request.abort is not None:
            abort.start()
        try:
            answer |= _read(self._post("generate", body), request)
        except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError) as error:
            said = error.read().decode(errors="replace")[:300] if isinstance(error, urllib.error.HTTPError) else ""
            answer["error"] = f"{type(error).__name__} {error} {said}".strip()
        abort.cancel()

    def _abort(self, name: str) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._post("abort_request", {"rid": name})

    def _post(self, path: str, body: Found) -> bytes:
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.server.url}/{path}", json.dumps(body).encode(), headers)
        with HERE.open(asked, timeout=max(1.0, self._left())) as answer:
            return answer.read()

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def look(self, folder: Path) -> None:
        """What the ranks ran, and what was patched."""
        self.found["ranks"] = _ranks(folder)
        self.found["patches"] = [
            [patch["id"] for patch in process["patches"] if patch["state"] == "applied"]
            for process in _schedulers(self.server)
        ]


def _read(answered: bytes, request: Request) -> Found:
    """Tokens, as many as are known, whether they are right, why they end, and by how much the closest of them won."""
    said, known = json.loads(answered), request.answer[: request.new]
    tokens, meta = said["output_ids"][: len(known)], said["meta_info"]
    margins = [first[0] - second[0] for first, second in (meta.get("output_top_logprobs") or [])[: len(known)]]
    return {
        "tokens": tokens,
        "end": meta["finish_reason"]["type"],
        "right": tokens == (known if request.abort is None else known[: len(tokens)]),
        "margin": round(min(margins), 4) if margins else None,
    }


def _schedulers(server: Server) -> list[Found]:
    processes = server.status()["processes"]
    return [process for process in processes if any("scheduler" in role for role in process["roles"])]


def _ranks(folder: Path) -> Found:
    """By rank the model's class, its steps, and how many of them without requests; what ranks did at the same time."""
    from tests.sglang.engines import read_steps

    ranks = read_steps(folder / "steps")
    steps = zip(*(rank.steps for rank in ranks), strict=False)
    together = Counter(" ".join(sorted(step["mode"].lower() for step in each)) for each in steps)
    return {
        "models": [rank.model for rank in ranks],
        "steps": [len(rank.steps) for rank in ranks],
        "idle": [sum(step["mode"] == "IDLE" for step in rank.steps) for rank in ranks],
        "together": dict(together.most_common()),
    }


def _look_at_the_hung(found: Found, server: Server, folder: Path) -> None:
    """What there is to know of a server that does not answer; ends its schedulers."""
    with contextlib.suppress(Exception):
        found["ranks"] = _ranks(folder)
    if server.process.poll() is not None:
        return
    with contextlib.suppress(Exception):
        for process in _schedulers(server):
            os.kill(process["pid"], signal.SIGABRT)  # SGLang has the stacks of all threads written to the log
    time.sleep(3)


def _faults(found: Found, options: argparse.Namespace, layout: str) -> Iterator[str]:
    """What must hold beside equal tokens."""
    ranks = _size(options, layout)
    if errors := [answer["error"] for answer in found["requests"] if "error" in answer]:
        yield f"{len(errors):,} requests not answered: {errors[0]}"
    if wrong := [number for number, answer in enumerate(found["requests"]) if not answer.get("right", True)]:
        yield f"{len(wrong):,} answers wrong, of requests {wrong[:10]}"
    ran = found["ranks"]
    if len(ran["models"]) != ranks or not all(model.startswith("atom_patches.") for model in ran["models"]):
        yield f"not every rank ran an ATOM decoder: {ran['models']}"
    if len(found["patches"]) != ranks or not all("sglang.models.registry" in ids for ids in found["patches"]):
        yield f"not every scheduler is patched: {found['patches']}"
    if ranks > 1 and not all(ran["idle"]):
        yield f"a rank was never idle: {ran['idle']}"
    if options.device == "cuda" and not found["graphs"]["True"]:
        yield "no decode step that SGLang logged was a graph's"


def _answered(found: Found) -> int:
    return sum("tokens" in answer for answer in found.get("requests", []))


def report(results: list[Found]) -> bool:
    """Print a table of what was found; whether all layouts gave one GPU's tokens, and nothing failed."""
    good = True
    one = next((result for result in results if result["layout"] == "sglang one"), None)
    for result in results:
        _show_answers(result)
        if one is not None and result is not one:
            good &= _show_differences(one, result)
        _show_ranks(result)
        if "failed" in result:
            print(f"{'':16} FAILED: {result['failed'].splitlines()[0]}")
            good = False
    return good


def _show_answers(result: Found) -> None:
    answers, seconds = result.get("requests", []), result.get("seconds", 0.0)
    aborted, right = sum(one.get("end") == "abort" for one in answers), sum(one.get("right", False) for one in answers)
    closest = min((one["margin"] for one in answers if one.get("margin") is not None), default=0.0)
    rate = f"{_answered(result) / seconds:.1f}" if seconds else "-"
    print(
        f"{result['layout']:16} {_answered(result):,} of {result['asked']:,} answered, {aborted} of them aborted, in "
        f"{seconds:.1f} s after {result.get('start', 0):.0f} s to start: {rate} a second"
    )
    print(f"{'':16} {right:,} of {result['asked']:,} right, the closest token by {closest:.2f}")


def _show_ranks(result: Found) -> None:
    for rank, model in enumerate(result.get("ranks", {}).get("models", [])):
        steps, idle = (result["ranks"][what][rank] for what in ("steps", "idle"))
        print(f"{'':16} rank {rank}: {model}, {steps:,} steps, {idle:,} of them idle")
    for patches, count in Counter(" ".join(patches) for patches in result.get("patches", [])).items():
        print(f"{'':16} applied in {count} of {len(result['patches'])} schedulers: {patches}")
    together = result.get("ranks", {}).get("together", {})
    if any(" " in modes for modes in together):
        print(f"{'':16} ranks together: {', '.join(f'{count:,} {modes}' for modes, count in together.items())}")
    if graphs := result.get("graphs"):
        replayed = f"{graphs.get('True', 0)} of {sum(graphs.values())}"
        print(f"{'':16} {replayed} decode steps that SGLang logged were graphs")


def _show_differences(one: Found, other: Found) -> bool:
    """Print how many answers are one GPU's, and some that are not; whether all are."""
    if one["traffic"] != other["traffic"]:
        print(f"{'':16} one GPU was asked something else")
        return False
    pairs = list(itertools.zip_longest(one.get("requests", []), other.get("requests", []), fillvalue={}))
    parted = [f"request {number}: {text}" for number, (a, b) in enumerate(pairs) if (text := _difference(a, b))]
    missing = other["asked"] - len(pairs)
    print(f"{'':16} {other['asked'] - missing - len(parted):,} of {other['asked']:,} equal to one GPU's")
    for text in parted[:10]:
        print(f"{'':18} {text}")
    return not parted and not missing


def _difference(one: Found, other: Found) -> str:
    """Empty if tokens are equal; of an aborted answer as many are compared as both have."""
    if "tokens" not in one or "tokens" not in other:
        return "no answer"
    both = min(len(one["tokens"]), len(other["tokens"])) if "abort" in (one["end"], other["end"]) else None
    if one["tokens"][:both] == other["tokens"][:both]:
        return ""
    closest = f"the closest token won by {one['margin']} and by {other['margin']}"
    return f"{one['tokens']} and {other['tokens']}; {closest}"
