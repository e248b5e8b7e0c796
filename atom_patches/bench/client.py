"""Ask a server of vLLM's or SGLang's through the OpenAI completions API: greedy answers, and how fast they come."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from atom_patches.bench import server
from atom_patches.bench.answers import CANDIDATES, Answer, Token

Prompt = str | list[int]
"""A text, or token ids."""

LIMIT_S = 600.0


class AnswerError(RuntimeError):
    """The server did not answer as it should; the message has what it said."""


@dataclass(frozen=True)
class Client:
    """A server, and how it is asked.

    Attributes:
        new: tokens of each answer, whether or not the text ends before.
        at_once: requests in flight.
    """

    url: str
    new: int
    at_once: int

    def model(self) -> str:
        """The name under which the server knows its model."""
        return _json(urllib.request.Request(f"{self.url}/v1/models"))["data"][0]["id"]

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers, with log-probabilities.

        Raises:
            AnswerError: a prompt got none.
        """
        return self._all(prompts, lambda found: _answer(found["choices"][0]), logprobs=CANDIDATES)

    def speed(self, prompts: Sequence[Prompt]) -> float:
        """Generated tokens a second, all prompts together.

        Raises:
            AnswerError: a prompt got no answer.
        """
        began = time.perf_counter()
        tokens = sum(self._all(prompts, lambda found: found["usage"]["completion_tokens"]))
        return tokens / (time.perf_counter() - began)

    def _all(self, prompts: Sequence[Prompt], read: Callable[[Any], Any], **more: Any) -> list[Any]:
        same = {"model": self.model(), "max_tokens": self.new, "temperature": 0, "ignore_eos": True}
        # vLLM's name for ids in place of texts, of which several tokens may share one; SGLang leaves it out.
        same |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **more}

        def ask(number: int) -> Any:
            body = json.dumps({**same, "prompt": prompts[number]}).encode()
            headers = {"Content-Type": "application/json"}
            try:
                return read(_json(urllib.request.Request(f"{self.url}/v1/completions", body, headers)))
            except (AnswerError, LookupError, TypeError) as error:
                raise AnswerError(f"prompt {number + 1}: {error}") from error

        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(ask, range(len(prompts))))


def shifted(prompts: Sequence[Prompt], round_: int) -> list[Prompt]:
    """The same prompts for another round, so that no cache has their beginnings: numbered, or ids turned round."""
    return [
        f"{round_}. {one}" if isinstance(one, str) else one[round_ % len(one) :] + one[: round_ % len(one)]
        for one in prompts
    ]


def _answer(choice: dict[str, Any]) -> Answer:
    found = choice["logprobs"]
    return Answer(
        tokens=[_token(one) for one in choice.get("token_ids") or found["tokens"]],
        logprobs=found["token_logprobs"],
        candidates=[[(_token(one), value) for one, value in (place or {}).items()] for place in found["top_logprobs"]],
    )


def _token(said: Token) -> Token:
    """The id, where what was said names one."""
    kind, _, number = str(said).partition(":")
    return int(number) if kind == "token_id" and number.isdecimal() else said


def _json(asked: urllib.request.Request) -> Any:
    try:
        with server.HERE.open(asked, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise AnswerError(f"{error.code} {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, ValueError) as error:
        raise AnswerError(f"{type(error).__name__} {error}") from error
