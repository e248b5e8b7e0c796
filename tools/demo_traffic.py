"""The demo's traffic: the same requests, in the same waves, to any server; and what came back.

Within a wave everything is in flight at once. A conversation sends its turns one after the other, each with the
server's own replies so far. Everything is greedy and ignores end-of-text, so lengths are the same everywhere.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

SEED = 20
PROMPT_TOKENS = (300, 4096)  # token ids that stand for text; below are bytes and special tokens
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Completion:
    """One request to /v1/completions with token ids as its prompts: usually one, one choice for each."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    stream: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class Conversation:
    """Several turns to /v1/chat/completions."""

    name: str
    turns: tuple[str, ...]
    max_tokens: int
    stream: bool = False


@dataclass
class Answer:
    """What one request got, per prompt in it: the prompt as the server saw it and the tokens that were sampled.

    `logprobs` are those of the sampled tokens, where they were asked for.
    """

    name: str
    kind: str
    prompt_tokens: int = 0
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    tokens: list[list[int]] = field(default_factory=list[list[int]])
    logprobs: list[float] = field(default_factory=list[float])
    error: str = ""


Wave = tuple[Completion | Conversation, ...]


def waves(seed: int = SEED) -> list[Wave]:
    """The traffic. Prompts of 1 to 1,200 tokens: below a split's minimum, one chunk, several chunks."""
    rng = random.Random(seed)

    def ids(*counts: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.randrange(*PROMPT_TOKENS) for _ in range(count)) for count in counts)

    def text(words: int) -> str:
        return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(words))

    unequal = tuple(
        Completion(f"prompt of {count}", ids(count), 24, stream=i % 2 == 1)
        for i, count in enumerate((1, 2, 7, 33, 150, 401, 700, 1200))
    )
    (prefix,) = ids(420)
    first, *tails = ((prefix + tail,) for tail in ids(30, 1, 40, 130))
    warm = (Completion("shared prefix, first", first, 16),)
    shared = tuple(
        Completion(f"shared prefix, tail of {len(prompts[0]) - len(prefix)}", prompts, 16, stream=i == 2)
        for i, prompts in enumerate(tails)
    )
    chats = (
        Conversation("chat of 3 turns", (text(60), text(5), text(25)), 20),
        Conversation("chat of 2 turns", (text(220), text(12)), 20, stream=True),
    )
    special = (
        Completion("max_tokens=1", ids(260), 1),
        Completion("max_tokens=1, prompt of 1", ids(1), 1),
        Completion("log-probabilities", ids(330), 16, logprobs=5),
        Completion("three prompts in one", ids(90, 5, 180), 12),
        Completion("long answer", ids(64), 96, stream=True),
    )
    return [unequal, warm, shared + chats, special]


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer as a list of chunks: one without streaming."""
    if not body.get("stream"):
        reply = await client.post(path, json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code} {reply.text[:300]}")
        return [reply.json()]
    chunks: list[dict[str, Any]] = []
    async with client.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code} {(await reply.aread())[:300]!r}")
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line[len("data: ") :]))
    return chunks


def _body(max_tokens: int, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "demo", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": stream, "return_token_ids": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _collect(answer: Answer, chunks: list[dict[str, Any]]) -> str:
    """Add the chunks to the answer; the first choice's text."""
    text = ""
    for chunk in chunks:
        if chunk.get("error"):
            raise RuntimeError(str(chunk["error"]))
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
        # A chat's prompt is the answer's, a completion's is its choice's.
        answer.prompts += [ids for part in (chunk, *chunk["choices"]) if (ids := part.get("prompt_token_ids"))]
        for choice in chunk["choices"]:
            while len(answer.tokens) <= choice["index"]:
                answer.tokens.append([])
            answer.tokens[choice["index"]] += choice.get("token_ids") or []
            if logprobs := choice.get("logprobs"):
                answer.logprobs += logprobs["token_logprobs"]
            if choice["index"] == 0:
                part = choice.get("delta") or choice.get("message") or choice
                text += part.get("content") or part.get("text") or ""
    return text


async def _complete(client: httpx.AsyncClient, request: Completion) -> list[Answer]:
    answer = Answer(request.name, "stream" if request.stream else "whole")
    body = _body(request.max_tokens, request.stream) | {"prompt": [list(prompt) for prompt in request.prompts]}
    if request.logprobs is not None:
        body["logprobs"] = request.logprobs
    try:
        _collect(answer, await _post(client, "/v1/completions", body))
    except (RuntimeError, httpx.HTTPError) as error:
        answer.error = f"{type(error).__name__} {error}"
    return [answer]


async def _converse(client: httpx.AsyncClient, request: Conversation) -> list[Answer]:
    answers: list[Answer] = []
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(request.turns, start=1):
        answer = Answer(f"{request.name}, turn {number}", "stream" if request.stream else "whole")
        answers.append(answer)
        messages.append({"role": "user", "content": turn})
        body = _body(request.max_tokens, request.stream) | {"messages": messages}
        try:
            said = _collect(answer, await _post(client, "/v1/chat/completions", body))
        except (RuntimeError, httpx.HTTPError) as error:
            answer.error = f"{type(error).__name__} {error}"
            break
        messages = [*messages, {"role": "assistant", "content": said}]
    return answers


async def _run(url: str, done: Callable[[int], None]) -> list[Answer]:
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for wave in waves():
            requests = [_complete(client, r) if isinstance(r, Completion) else _converse(client, r) for r in wave]
            for part in await asyncio.gather(*requests):
                answers += part
            done(len(answers))
    return answers


def run(url: str, done: Callable[[int], None]) -> list[Answer]:
    """Send all of the traffic; `done` hears, after each wave, how many requests have been answered."""
    return asyncio.run(_run(url, done))
