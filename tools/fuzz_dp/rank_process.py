"""The process of one rank: it runs the steps that the driver sends, and says what it entered; `python -m` starts it.

A second connection answers, from a thread, where the rank is: that works while the rank waits in a collective.
"""

from __future__ import annotations

import argparse
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from . import recorder as recording_tools
from .checks import Checks
from .recorder import Recorder, recording


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("rank", type=int)
    options = parser.parse_args()
    work = Client(options.socket)
    work.send(("work", options.rank))
    watch = Client(options.socket)
    watch.send(("watch", options.rank))
    setting: dict[str, Any] = work.recv()
    with recording() as recorder:
        threading.Thread(target=_answer, args=(watch, recorder), daemon=True, name="watch").start()
        _run(work, recorder, options.rank, setting)


def _answer(watch: Connection, recorder: Recorder) -> None:
    while True:
        try:
            watch.recv()
            watch.send((recorder.peek(), recording_tools.stacks()))
        except (EOFError, OSError):
            return


def _run(work: Connection, recorder: Recorder, rank: int, setting: dict[str, Any]) -> None:
    import torch

    from .sglang_rank import Rank, server_args

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    try:
        arguments = server_args(Path(setting["model"]), setting["ranks"], setting["layout"], setting["port"])
        engine = Rank(rank, arguments, setting["port"])
        checks = Checks(engine, recorder, setting["decoders"])
    except BaseException:
        work.send(("failed", traceback.format_exc(), recorder.cut()))
        raise
    work.send(("ready", engine.decoder(), recorder.cut()))
    while (actions := work.recv()) is not None:
        try:
            with checks.around(actions[rank]):
                engine.step(actions[rank], any(action.kind == "verify" for action in actions))
        except Exception:  # whatever it is, it is the finding
            work.send(("failed", traceback.format_exc(), recorder.cut()))
            return
        work.send(("done", checks.layers, recorder.cut()))
    work.send(("bye", checks.summary(), recorder.cut()))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
