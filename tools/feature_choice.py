"""What an engine, and this package in it, make of configurations, without starting an engine.

    python feature_choice.py vllm|sglang PLAN RESULT

PLAN is a JSON list of `options` and `env`. RESULT has for each either the `error` that stopped it, and whether that is
this package's (`ours`); or whether an ATOM decoder was chosen (`decoder`) and why or why not (`reason`), and of what
this package warned (`said`).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Said(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def vllm_decoder(options: dict[str, Any]) -> Any:
    """The verdict about a configuration of vLLM's, which is made first."""
    from vllm.engine.arg_utils import EngineArgs

    from atom_patches.vllm.models._config import atom_models_asked

    usual = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512}
    return atom_models_asked(EngineArgs(**{**usual, **options}).create_engine_config())


def sglang_decoder(options: dict[str, Any]) -> Any:
    """The verdict about a configuration of SGLang's, which is made first."""
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    from atom_patches.sglang.models._config import atom_models_asked

    args = ServerArgs(**options)
    args.check_server_args()
    return atom_models_asked(args)


DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {"vllm": vllm_decoder, "sglang": sglang_decoder}


def outcome(engine: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Try one configuration, for which this process is there alone."""
    from atom_patches.core import PatchError
    from atom_patches.core.log import logger

    said = Said()
    logger().addHandler(said)
    os.environ.update(asked["env"])
    try:
        verdict = DECODERS[engine](asked["options"])
    except PatchError as error:
        return {"error": str(error), "ours": True}
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is the answer
        return {"error": f"{type(error).__name__}: {error}", "ours": False}
    return {"decoder": verdict.ok, "reason": verdict.reason, "said": said.lines}


def alone(engine: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The outcome in a process that leaves nothing behind for the next.

    Not one of multiprocessing's, in which the overlay takes itself for a worker, and warns of nothing.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(outcome(engine, asked), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process ended without a word", "ours": False}


def warm(engine: str, asked: dict[str, Any]) -> None:
    """Import here what a configuration needs, which every process after this one would import for itself."""
    outer = dict(os.environ)
    outcome(engine, {**asked, "env": {**asked["env"], "ATOM_MODELS": "0"}})
    os.environ.clear()
    os.environ.update(outer)
    gc.collect()
    gc.freeze()  # the collector would write to the pages that processes share


def main() -> None:
    engine, plan, result = sys.argv[1:]
    import atom_patches  # noqa: F401 - arms, where the environment lets it

    asked = json.loads(Path(plan).read_text())
    if asked:
        warm(engine, asked[0])
    Path(result).write_text(json.dumps([alone(engine, one) for one in asked]))


if __name__ == "__main__":
    main()
