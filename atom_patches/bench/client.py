"""Ask a server of vLLM's or SGLang's: greedy answers, and how fast they come.

Through the OpenAI completions API; for what SGLang tells there by halves, through its own.
"""

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

Request = Callable[[Prompt], dict[str, Any]]
"""What is sent for a prompt."""

COMPLETIONS = "/v1/completions"
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

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers, with log-probabilities.

        Raises:
            AnswerError: a prompt got none.
        """
        if self._model().get("owned_by") == "sglang":
            # In completions its candidates are texts, and several tokens may share one.
            return self._all(prompts, "/generate", self._for_sglang, _sglang_answer)
        return self._all(prompts, COMPLETIONS, self._for_answers(), _answer)

    def speed(self, prompts: Sequence[Prompt]) -> float:
        """Generated tokens a second, all prompts together.

        Raises:
            AnswerError: a prompt got no answer.
        """
        asked = self._for_completion()
        began = time.perf_counter()
        tokens = sum(self._all(prompts, COMPLETIONS, asked, lambda found: found["usage"]["completion_tokens"]))
        return tokens / (time.perf_counter() - began)

    def _model(self) -> dict[str, Any]:
        """What the server says about its model."""
        return _json(urllib.request.Request(f"{self.url}/v1/models"))["data"][0]

    def _for_completion(self, **more: Any) -> Request:
        same = {"model": self._model()["id"], "max_tokens": self.new, "temperature": 0, "ignore_eos": True, **more}
        return lambda prompt: {**same, "prompt": prompt}

    def _for_answers(self) -> Request:
        # vLLM's name for ids in place of texts, of which several tokens may share one.
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return self._for_completion(**ids, logprobs=CANDIDATES)

    def _for_sglang(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": self.new, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": CANDIDATES,
        }

    def _all(self, prompts: Sequence[Prompt], path: str, request: Request, read: Callable[[Any], Any]) -> list[Any]:
        def ask(number: int) -> Any:
            body = json.dumps(request(prompts[number])).encode()
            headers = {"Content-Type": "application/json"}
            try:
                return read(_json(urllib.request.Request(f"{self.url}{path}", body, headers)))
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


def _answer(said: dict[str, Any]) -> Answer:
    """Of what came through the OpenAI completions API."""
    choice = said["choices"][0]
    found = choice["logprobs"]
    return Answer(
        tokens=[_token(one) for one in choice.get("token_ids") or found["tokens"]],
        logprobs=found["token_logprobs"],
        candidates=[[(_token(one), value) for one, value in (place or {}).items()] for place in found["top_logprobs"]],
    )


def _sglang_answer(said: dict[str, Any]) -> Answer:
    """Of SGLang's own interface, where a token is its log-probability, its id and more."""
    taken, ranked = (said["meta_info"][f"output_{what}_logprobs"] for what in ("token", "top"))
    return Answer(
        tokens=[one[1] for one in taken],
        logprobs=[one[0] for one in taken],
        candidates=[[(one[1], one[0]) for one in place or []] for place in ranked],
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
