"""Speaks as much of the OpenAI completions API as `compare` uses; tokens follow from the prompt alone.

    python tests/unit/stand_in_server.py --port N [--unhealthy | --refuses] [--sglang]

Armed (ATOM_PATCHES=1), it says that a patch is in place, unless APPLIES=0, and is wrong as WRONG tells: `token` or
`tie`, in the third place of every answer. As SGLang it has ids of candidates in that engine's own interface alone.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from atom_patches.core import report

ARMED = os.environ.get("ATOM_PATCHES") == "1"
WRONG = os.environ.get("WRONG", "") if ARMED else ""
PLACE = 2
SGLANG = "--sglang" in sys.argv
MARGIN = {"tie": 0.01}.get(os.environ.get("WRONG", ""), 2.0)


Place = dict[int, float]


def places(prompt: Any, new: int) -> list[Place]:
    """Of each, the token that is taken, and another one, with their log-probabilities."""
    pairs = [(token, token + 1) for token in (zlib.crc32(f"{prompt} {place}".encode()) % 1000 for place in range(new))]
    if WRONG:
        pairs[PLACE] = pairs[PLACE][1], pairs[PLACE][0]
    return [{token: -0.1, other: -0.1 - MARGIN} for token, other in pairs]


def completion(prompt: Any, new: int) -> dict[str, Any]:
    found = places(prompt, new)
    name = "a text" if SGLANG else "token_id:{}"
    tokens = [next(iter(place)) for place in found]
    said = {
        "tokens": [name.format(token) for token in tokens],
        "token_logprobs": [-0.1] * new,
        "top_logprobs": [{name.format(token): logprob for token, logprob in place.items()} for place in found],
    }
    return {"choices": [{"token_ids": tokens, "logprobs": said}], "usage": {"completion_tokens": len(tokens)}}


def generated(prompt: Any, new: int) -> dict[str, Any]:
    """What SGLang's own interface says."""
    ranked = [[[logprob, token, None] for token, logprob in place.items()] for place in places(prompt, new)]
    return {"meta_info": {"output_token_logprobs": [place[0] for place in ranked], "output_top_logprobs": ranked}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply(
            503 if "--unhealthy" in sys.argv else 200,
            {"data": [{"id": "stand-in", "owned_by": "sglang" if SGLANG else "vllm"}]},
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--refuses" in sys.argv:
            self._reply(400, {"message": "this prompt is too long"})
        elif self.path == "/generate":
            params = asked["sampling_params"]
            assert SGLANG and asked["return_logprob"] and params["temperature"] == 0
            self._reply(200, generated(asked.get("text") or asked["input_ids"], params["max_new_tokens"]))
        else:
            assert asked["model"] == "stand-in" and asked["temperature"] == 0
            self._reply(200, completion(asked["prompt"], asked["max_tokens"]))

    def _reply(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


if __name__ == "__main__":
    if ARMED:
        state = "off" if os.environ.get("APPLIES") == "0" else "applied"
        patches = [report.PatchReport("vllm.bootstrap.configured", "applied", ""),
                   report.PatchReport("vllm.models.initialize_model", state, "a reason")]  # fmt: skip
        report.publish(role="api server", engine="vllm", version="0", config={}, patches=patches)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
