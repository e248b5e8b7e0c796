"""Speaks as much of the OpenAI completions API as `compare` uses; tokens follow from the prompt alone.

    python tests/unit/stand_in_server.py --port N [--unhealthy | --refuses]

Armed (ATOM_PATCHES=1), it says that a patch is in place, unless APPLIES=0, and is wrong as WRONG tells: `token` or
`tie`, in the third place of every answer.
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
MARGIN = {"tie": 0.01}.get(os.environ.get("WRONG", ""), 2.0)


def answer(prompt: Any, new: int) -> dict[str, Any]:
    tokens = [zlib.crc32(f"{prompt} {place}".encode()) % 1000 for place in range(new)]
    others = [token + 1 for token in tokens]
    logprobs = [-0.1] * new
    if WRONG:
        tokens[PLACE], others[PLACE] = others[PLACE], tokens[PLACE]
    top = [
        {f"token_id:{token}": one, f"token_id:{other}": one - MARGIN}
        for token, other, one in zip(tokens, others, logprobs, strict=True)
    ]
    said = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": logprobs, "top_logprobs": top}
    return {"choices": [{"token_ids": tokens, "logprobs": said}], "usage": {"completion_tokens": len(tokens)}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply(503 if "--unhealthy" in sys.argv else 200, {"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "stand-in" and asked["temperature"] == 0
        if "--refuses" in sys.argv:
            self._reply(400, {"message": "this prompt is too long"})
        else:
            self._reply(200, answer(asked["prompt"], asked["max_tokens"]))

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
