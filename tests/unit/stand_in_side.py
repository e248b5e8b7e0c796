"""Answers as an engine of `bench engine` does, at once: `stand_in_side.py FD PLAN`, with what is wrong in WRONG.

WRONG may begin with a side's name and a colon; else it is wrong in all sides but stock. The decoder knows all fusions
but `experts`, each of which takes 1 ms off.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

FUSIONS = ("qk_rope", "kv_cache")

connection = Connection(int(sys.argv[1]))
ours = os.environ.get("ATOM_MODELS") == "1"
side = Path(json.loads(sys.argv[2])["folder"]).name.partition(".")[2]
whose, _, wrong = os.environ.get("WRONG", "").rpartition(":")
if not ours or whose not in ("", side):
    wrong = ""
asked_for = os.environ.get("ATOM_FUSIONS", "1").split(",")
fusions = [one for one in FUSIONS if ours and ("1" in asked_for or one in asked_for or wrong == "fused")]
if wrong == "lost":
    sys.exit(9)
model = "atom_patches.model" if ours and wrong != "stock" else "vllm.model"
print("a line of the log\noptions", json.loads(sys.argv[2])["options"], flush=True)
if model == "vllm.model" or wrong == "plain":
    fusions = []
about = {"model": model, "fusions": fusions, "graphs": "no graphs", "seconds": 1, "device": "d", "versions": {}}
connection.send_bytes(json.dumps(about).encode())
asked = 0
while True:
    what = json.loads(connection.recv_bytes())
    asked += 1
    if wrong == "ends" and asked == 3:
        sys.exit(7)
    if what["what"] == "answers":
        answer = {"tokens": [1, 2], "logprobs": [-0.1, -0.9 if wrong == "logprob" else -0.1], "candidates": [[], []]}
        said: object = [answer]
    else:
        seconds = 0.004 + 0.001 * (len(FUSIONS) - len(fusions)) if ours and wrong != "slow" else 0.005
        said = [seconds * (2 if wrong == "slow" else 1), seconds]
    connection.send_bytes(json.dumps(said).encode())
