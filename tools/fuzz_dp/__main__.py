"""Drive real SGLang ranks through random steps; every rank must enter the same collectives.

    python -m fuzz_dp --steps 300 --ranks 2                # the overlay's decoders, experts cut over the ranks
    python -m fuzz_dp --ranks 3 --layout ep                # experts dealt out
    python -m fuzz_dp --decoders stock                     # SGLang's own
    python -m fuzz_dp --seed 7 --ranks 2 --steps 41        # the same steps again

Prints the steps by kind and `divergences=0`; or the first step in which two ranks part, both sequences and the Python
stacks, and `divergences=1`. A rank that raises, or breaks a rule of checks.py, counts as a divergence.
"""

from __future__ import annotations

import argparse
import collections
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import environment
from .driver import Finding, running
from .schedule import steps
from .sglang_rank import write_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz_dp", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=("tp", "ep"), default="tp", help="experts: cut over all ranks, or dealt")
    parser.add_argument("--decoders", choices=("atom", "stock"), default="atom")
    parser.add_argument("--deadline", type=float, default=30, help="seconds after which a step counts as a hang")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-dp-model-") as model:
        write_model(Path(model))
        return fuzz(options, model)


def fuzz(options: argparse.Namespace, model: str) -> int:
    setting: dict[str, Any] = {
        "model": model,
        "ranks": options.ranks,
        "layout": options.layout,
        "decoders": options.decoders,
        "port": _free_port(),
    }
    variables = environment.variables(options.decoders)
    kinds: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    with running(options.ranks, setting, variables, options.deadline) as ranks:
        finding = ranks.start()
        if finding is not None:
            return _report(options, finding, 0)
        print(f"{options.ranks} ranks run {' and '.join(sorted(ranks.classes))}", flush=True)
        for number, actions in enumerate(steps(options.ranks, options.steps, options.seed)):
            kinds.update(action.kind for action in actions)
            finding = ranks.step(number, actions)
            if finding is not None:
                return _report(options, finding, number + 1)
        counted = collections.Counter[str]()
        for summary in ranks.finish():
            counted.update(summary)
    print("ran " + ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())))
    print("decoder " + ", ".join(f"{what}: {count}" for what, count in counted.items()))
    seconds = time.monotonic() - begun
    print(f"steps={options.steps} ranks={options.ranks} seed={options.seed} seconds={seconds:.0f} divergences=0")
    return 0


def _report(options: argparse.Namespace, finding: Finding, done: int) -> int:
    print(finding)
    print(f"again: python -m fuzz_dp --ranks {options.ranks} --layout {options.layout} --decoders {options.decoders}"
          f" --seed {options.seed} --steps {done}")  # fmt: skip
    print(f"found: {finding.headline()}")
    print(f"steps={done} ranks={options.ranks} seed={options.seed} divergences=1")
    return 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
