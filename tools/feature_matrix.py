"""Meet ATOM decoders, and every feature of an engine that users combine, with each other, on the CPU.

    python tools/feature_matrix.py              # all of it, with the engine of this environment
    python tools/feature_matrix.py --new        # what the record lacks
    python tools/feature_matrix.py --decide     # ask about every configuration, and run no engine
    python tools/feature_matrix.py --list       # the engines that the record's decisions imply
    python tools/feature_matrix.py --check      # exit status 1 if docs/features.md is not what the records say

What is asked for is declared in tools/features.py. Each configuration is served by an ATOM decoder; or left to the
engine's own, with one line that names the option; or refused, by name; or something that the engine has not on the CPU,
whoever's decoder. Of what is served, engines run, and their answers have to be those of one rank with the engine's own
decoder, and of transformers. Anything else is a fault, and the exit status 1. What was found is kept in envs/features.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import feature_decisions  # noqa: E402
from feature_rows import (  # noqa: E402
    ABSENT,
    EQUAL,
    FAULT,
    REFUSED,
    SERVED,
    STOCK,
    Case,
    Decision,
    decoder_of,
    rows,
)
from feature_table import PART, Record, read, write  # noqa: E402
from features import ENGINES, Engine  # noqa: E402

from atom_patches.core import gates  # noqa: E402

LOGS = ROOT / "build" / "feature-matrix"
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def installed() -> Engine:
    """The engine of this environment."""
    for engine in ENGINES.values():
        if importlib.util.find_spec(engine.name) is not None:
            version = gates.engine_version(importlib.import_module(f"atom_patches.{engine.name}.engine").ENGINE)
            if version.partition("+")[0] != engine.version:
                raise SystemExit(f"feature-matrix: {engine.title} {version} is installed, not {engine.version}")
            return engine
    raise SystemExit(f"feature-matrix: this environment has none of {', '.join(ENGINES)}")


def run(engine: Engine, chosen: list[Case], decided: Mapping[Case, Decision]) -> Iterator[tuple[Case, dict[str, str]]]:
    """Run engines; each case with its `result` (`equal`, or what is not) and the `decoder` that ran."""
    if engine.name == "vllm":
        import feature_vllm as launcher
    else:
        import feature_sglang as launcher
    folder = LOGS / engine.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for case, result, decoder in launcher.run(engine, chosen, folder, say):
        expected = decoder_of(engine, decided, case)
        if result == EQUAL and decoder != expected:
            result = f"equal, but its decoder was {decoder}, not {expected}"
        say(f"{case}: {result}")
        yield case, {"result": result, "decoder": decoder}


def lines(engine: Engine, record: Record) -> Iterator[str]:
    """What a run found, fault by fault, and the counts."""
    for case, decision in record.decisions.items():
        if decision.state == FAULT:
            yield f"FAULT  {case}: {decision.detail}"
    for case, ran in record.engines.items():
        if ran["result"] != EQUAL:
            yield f"FAULT  {case}: {ran['result']}"
    counted = Counter(decision.state for decision in record.decisions.values())
    shown = ", ".join(f"{counted[state]} {state}" for state in (SERVED, STOCK, REFUSED, ABSENT, FAULT))
    equal = sum(ran["result"] == EQUAL for ran in record.engines.values())
    yield f"feature-matrix: {engine.title} {engine.version}: {len(record.decisions)} configurations: {shown}"
    yield f"feature-matrix: {engine.title} {engine.version}: {len(record.engines)} engines: {equal} equal"


def renew(engine: Engine, *, decide_only: bool = False, new: bool = False, only: str = "") -> Record:
    """Ask, run, and keep what was found, as it comes.

    Args:
        engine: the engine.
        decide_only: run no engine; results of engines are kept.
        new: neither ask nor run what the record has.
        only: run the engines whose name has this; the other results are kept.
    """
    before = read(engine)
    known = before.decisions if new or only else {}
    say(f"{engine.title}: making configurations")
    decisions = feature_decisions.decide(engine, LOGS / f"{engine.name}-decisions", known)
    wanted = rows(engine, decisions)
    kept = before.engines if decide_only or new or only else {}
    ran = {case: found for case, found in kept.items() if case in wanted}
    chosen = [case for case in wanted if only in str(case) and not decide_only and not (new and case in ran)]
    say(f"{engine.title}: {len(decisions)} configurations; {len(chosen)} of {len(wanted)} engines to run")
    record = Record(str(datetime.date.today()), decisions, ran)
    write(engine, record)
    for case, found in run(engine, chosen, decisions) if chosen else ():
        record.engines[case] = found
        write(engine, record)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--decide", action="store_true", help="run no engine")
    mode.add_argument("--list", action="store_true", help="name the engines, and run none")
    mode.add_argument("--check", action="store_true", help="compare docs/features.md with the records")
    mode.add_argument("--write", action="store_true", help="write docs/features.md from the records")
    parser.add_argument("--new", action="store_true", help="neither ask nor run what the record has")
    parser.add_argument("--only", metavar="TEXT", default="", help="run the engines whose name has this")
    arguments = parser.parse_args()
    if arguments.check:
        return PART.check("make feature-matrix")
    if arguments.write:
        PART.write()
        return 0
    engine = installed()
    if arguments.list:
        print(*rows(engine, read(engine).decisions), sep="\n")
        return 0
    record = renew(engine, decide_only=arguments.decide, new=arguments.new, only=arguments.only)
    PART.write()
    found = list(lines(engine, record))
    print(*found, sep="\n")
    return 1 if any(line.startswith("FAULT") for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
