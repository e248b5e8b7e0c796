"""Answers as an engine of `bench engine` does, at once: `stand_in_side.py FD PLAN`, with what is wrong in WRONG."""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
ours = os.environ.get("ATOM_MODELS") == "1"
wrong = os.environ.get("WRONG", "") if ours else ""
model = "atom_patches.model" if ours and wrong != "stock" else "vllm.model"
print("a line of the log", flush=True)
connection.send_bytes(json.dumps({"model": model, "seconds": 1, "device": "d", "versions": {}}).encode())
asked = 0
while True:
    what = json.loads(connection.recv_bytes())
    asked += 1
    if wrong == "ends" and asked == 3:
        sys.exit(7)
    if what["what"] == "answers":
        answer = {"tokens": [1, 2], "logprobs": [-0.1, -0.9 if wrong == "logprob" else -0.1], "margins": [1.0, 1.0]}
        said = [answer]
    else:
        seconds = 0.004 if ours and wrong != "slow" else 0.005
        said = [seconds * (2 if wrong == "slow" else 1), seconds]
    connection.send_bytes(json.dumps(said).encode())
