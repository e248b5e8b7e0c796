"""What comes of each configuration of the feature matrix, asked of the engine with this package and without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feature_rows import ABSENT, FAULT, REFUSED, SERVED, STOCK, Case, Decision, cases, env, options
from features import Engine, Feature
from toolcache import ROOT

Answer = dict[str, Any]
SCRIPT = Path(__file__).with_name("feature_choice.py")
ASKED = {"ATOM_MODELS": "1"}
WITHOUT = {"ATOM_PATCHES": "0"}
#: Of all configurations of an engine.
SECONDS = 900


def decide(engine: Engine, folder: Path, known: Mapping[Case, Decision]) -> dict[Case, Decision]:
    """The decision for each case, of which those that are known are not asked for again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asked = [case for case in cases(engine) if case not in known]
    ours = dict(zip(asked, _answers(engine, asked, folder / "on", ASKED), strict=True))
    # What the engine itself says matters where it stops.
    stopped = [case for case, one in ours.items() if "error" in one and not one["ours"]]
    stock = dict(zip(stopped, _answers(engine, stopped, folder / "off", WITHOUT), strict=True))
    found = {case: judge(engine, case, one, stock.get(case, {})) for case, one in ours.items()}
    return {case: found[case] if case in found else known[case] for case in cases(engine)}


def judge(engine: Engine, case: Case, ours: Answer, stock: Answer) -> Decision:
    """The decision that two answers add up to.

    Args:
        engine: the engine.
        case: what was asked for.
        ours: the engine's answer with this package.
        stock: without it, where this package's has an error that is the engine's.
    """
    features = [engine.feature(name) for name in case.features]
    if "error" in ours:
        text = plain(ours["error"])
        if ours["ours"]:
            named = _names(features, ours["error"])
            return Decision(REFUSED, text) if named else Decision(FAULT, f"refused without naming an option: {text}")
        if "error" in stock:
            return Decision(ABSENT, text)
        return Decision(FAULT, f"{engine.title} with this package stops: {text}")
    said = [plain(line) for line in ours["said"] if "is not applied" in line]
    if ours["decoder"]:
        # Something else that was asked for may be left to the engine.
        return Decision(SERVED, "; ".join(said))
    said = [line for line in said if f"{engine.name}.models is not applied" in line]
    if len(said) != 1:
        return Decision(FAULT, f"left to {engine.title} with {len(said)} lines that say so: {ours['reason']}")
    if not _names(features, said[0]):
        return Decision(FAULT, f"the line does not name an option: {said[0]}")
    return Decision(STOCK, ours["reason"].partition("does not serve: ")[2] or ours["reason"])


def _names(features: list[Feature], text: str) -> bool:
    return any(one.option in text for one in features)


def plain(text: str) -> str:
    """A message in one line, without what leads up to its reasons, and without what Pydantic adds."""
    text = text.partition(" [type=")[0]
    found = [line.strip() for line in text.splitlines()]
    reasons = [line[2:] for line in found if line.startswith("- ") and not line.endswith(":")]
    return "; ".join(reasons) or " ".join(found)


def _answers(engine: Engine, asked: list[Case], folder: Path, more: dict[str, str]) -> list[Answer]:
    if not asked:
        return []
    sys.path.insert(0, str(ROOT))
    launched, usual, model = _launcher(engine)
    plan = [
        {
            "options": usual | options(engine, case) | {model: _path(engine, case)},
            "env": env(engine, case) | more,
        }
        for case in asked
    ]
    folder.mkdir()
    plan_file, result, log = folder / "plan.json", folder / "result.json", folder / "log.txt"
    plan_file.write_text(json.dumps(plan))
    command = [sys.executable, str(SCRIPT), engine.name, str(plan_file), str(result)]
    with log.open("w") as out:
        subprocess.run(command, env=launched, cwd=folder, stdout=out, stderr=out, timeout=SECONDS, check=True)
    return json.loads(result.read_text())


def _path(engine: Engine, case: Case) -> str:
    """The checkpoint's folder."""
    from checkpoints import checkpoint
    from quantised import quantised

    name = engine.family(case.family).checkpoint
    formats = [form for one in case.features if (form := engine.feature(one).weights)]
    return str(quantised(name, formats[0])[0] if formats else checkpoint(name))


def _launcher(engine: Engine) -> tuple[dict[str, str], dict[str, Any], str]:
    """The environment of an engine's tests, their options, and the name of the option for the checkpoint."""
    if engine.name == "vllm":
        from tests.vllm import gdn_oracle

        return gdn_oracle.environment(PYTHONPATH=str(ROOT)), {}, "model"
    from tests.sglang import environment as sglang

    return sglang.environment(ROOT, SGLANG_PLUGINS="atom"), sglang.options(), "model_path"
