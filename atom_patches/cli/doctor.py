"""`doctor`: what keeps patches from doing what was asked, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import site
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlparse

from atom_patches.cli import catalogue
from atom_patches.core import gates, late, report, settings
from atom_patches.core.patch import Patch, State

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands

DISTRIBUTION = "atom-patches"
PLUGIN = "atom"
ALLOW_LISTS = {"VLLM_PLUGINS": "vllm.", "SGLANG_PLUGINS": "sglang."}
"""The engines' plugin lists, and how the entry-point groups begin that each one filters."""


class Finding(NamedTuple):
    """Something that a person should know; a problem is something to be fixed."""

    is_problem: bool
    message: str


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "doctor",
        "find what is wrong with the installation, environment or processes",
        "Look at the installation, the variables, the engines and the running processes, and say what keeps patches "
        "from doing what was asked. Exit status: 0 fine, 1 there is a problem.",
        [("doctor", "problems, and what to do"), ("doctor --json", "for a script")],
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 if one of them is a problem."""
    findings = [*launch_checks(), *plugin_checks()]
    if settings.invalid_values(catalogue.all_features()):
        findings.append(_note("engines and processes were not looked at: the values above say how."))
    else:
        findings += [*engine_checks(), *process_checks()]
    problems = sum(finding.is_problem for finding in findings)
    if arguments.json:
        print(json.dumps({"problems": problems, "findings": [_plain(finding) for finding in findings]}, indent=1))
    else:
        for finding in findings:
            print(f"{_word(finding)}: {finding.message}")
        print(f"doctor: {problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


def _plain(finding: Finding) -> dict[str, str]:
    return {"kind": _word(finding), "message": finding.message}


def _word(finding: Finding) -> str:
    return "problem" if finding.is_problem else "note"


def launch_checks() -> list[Finding]:
    """What would keep a launch from this environment from doing what is asked."""
    return [*_copies(), *_pth(), *_variables()]


def plugin_checks() -> list[Finding]:
    """The engines' own plugin lists, and who else answers to our name."""
    return [*_namesakes(), *_allow_lists(), *_misspelt_allow_lists()]


def engine_checks() -> list[Finding]:
    """Installed engines that patches were not reviewed for; one that some were reviewed for is none to be fixed."""
    return list(_engines())


def process_checks() -> list[Finding]:
    """What running processes report."""
    try:
        processes = report.processes()
    except report.StateDirError as error:
        return [_problem(str(error))]
    return [finding for process in processes for finding in _process(process)]


def _problem(message: str) -> Finding:
    return Finding(True, message)


def _note(message: str) -> Finding:
    return Finding(False, message)


# Installation


def _copies() -> Iterator[Finding]:
    """Several copies of the package: which one runs depends on the order of sys.path."""
    places = sorted({_source(found) for found in importlib.metadata.distributions(name=DISTRIBUTION)})
    if len(places) > 1:
        listed = ", ".join(map(str, places))
        yield _problem(
            f"atom-patches is installed {len(places)} times: {listed}. "
            "Which one a process imports depends on its path: uninstall all but one."
        )
    running = Path(__file__).resolve().parents[2]
    if places and running not in places:
        yield _problem(
            f"this is the package in {running}, but the installed one is in {places[0]}: "
            "an engine started elsewhere uses that one. Install this one, or leave its folder."
        )


def _source(found: importlib.metadata.Distribution) -> Path:
    """The folder that a distribution's modules are imported from."""
    direct: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(str(direct["url"])).path)).resolve()
    return Path(str(found.locate_file(""))).resolve()


def _pth() -> Iterator[Finding]:
    folders = {*site.getsitepackages(), site.getusersitepackages(), *sys.path}
    if not any((Path(folder) / "atom_patches.pth").is_file() for folder in folders if folder and _is_site(folder)):
        yield _problem(
            "atom_patches.pth is in no site-packages folder of this interpreter, so ATOM_PATCHES=1 arms nothing "
            "and an engine's child processes run unpatched. Install the package with pip."
        )


def _is_site(folder: str) -> bool:
    return Path(folder).name in ("site-packages", "dist-packages")


# Environment


def _variables() -> Iterator[Finding]:
    features = catalogue.all_features()
    for message in (*settings.invalid_values(features), *settings.unknown_names(features)):
        yield _problem(message)


def _namesakes() -> Iterator[Finding]:
    """Other distributions whose plugin is called `atom`: ROCm/ATOM's is."""
    for group in sorted(_groups()):
        for entry_point in importlib.metadata.entry_points(group=group, name=PLUGIN):
            owner = _owner(entry_point)
            if owner != DISTRIBUTION:
                yield _problem(
                    f"{owner} has a plugin called {PLUGIN!r} in {group} as well ({entry_point.value}). Engines keep "
                    f"one plugin a name, so naming {PLUGIN!r} in a plugin list starts either. Arm with ATOM_PATCHES=1 "
                    f"instead, which needs no plugin list, or uninstall {owner}."
                )


def _allow_lists() -> Iterator[Finding]:
    for variable, prefix in ALLOW_LISTS.items():
        listed = os.environ.get(variable)
        if listed is None:
            continue
        known = _plugins(prefix)
        names = [name for name in listed.split(",") if name]
        for name in names:
            if name not in known:
                yield _problem(_unknown_plugin(variable, name, known))
        if PLUGIN not in names and _left_to_lists():
            yield _note(f"{variable}={listed} shuts atom_patches out: add {PLUGIN} to it, or set ATOM_PATCHES=1.")
        shut_out = sorted(name for name in known if name not in names and name != PLUGIN)
        if shut_out:
            yield _note(f"{variable}={listed} shuts out other installed plugins: {', '.join(shut_out)}.")


def _left_to_lists() -> bool:
    """Whether the master switch leaves arming to the plugin lists."""
    return os.environ.get("ATOM_PATCHES", "") in ("", "0")


def _unknown_plugin(variable: str, name: str, known: Iterable[str]) -> str:
    if name.strip() in known:
        return f"{variable} names {name!r}, with white space that engines do not strip. Write it without."
    near = settings.nearest(name.strip(), {*known, PLUGIN}, cutoff=0.5)
    hint = f"did you mean {near!r}?" if near else "no installed plugin has a similar name."
    return f"{variable} names {name!r}, which is not an installed plugin and is ignored; {hint}"


def _misspelt_allow_lists() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if not name.startswith(("VLLM", "SGLANG")) or name in ALLOW_LISTS:
            continue
        near = settings.nearest(name, ALLOW_LISTS, cutoff=0.88)
        if near:
            yield _problem(f"{name} is not a variable of the engine; did you mean {near}?")


def _groups() -> list[str]:
    prefixes = tuple(ALLOW_LISTS.values())
    return [group for group in importlib.metadata.entry_points().groups if group.startswith(prefixes)]


def _plugins(prefix: str) -> dict[str, str]:
    """Installed plugins of one engine: name -> distribution."""
    return {
        entry_point.name: _owner(entry_point)
        for group in _groups()
        if group.startswith(prefix)
        for entry_point in importlib.metadata.entry_points(group=group)
    }


def _owner(entry_point: importlib.metadata.EntryPoint) -> str:
    name = entry_point.dist.name if entry_point.dist is not None else "an unnamed distribution"
    return re.sub(r"[-_.]+", "-", name).lower()


# Engines


def _engines() -> Iterator[Finding]:
    installed = [catalogue.installed(engine) for engine in catalogue.engines()]
    if all(found.location is None for found in installed):
        names = " or ".join(found.engine.name for found in installed)
        yield _note(f"no engine is installed in this environment ({names}).")
    for found in installed:
        if found.location is None:
            continue
        unfit: dict[State, list[Patch]] = defaultdict(list)
        patches = [patch for patch in catalogue.patches(found.engine) if patch.kind != "bootstrap"]
        for patch in patches:
            unfit[catalogue.standing(found, patch).state].append(patch)
        if unfit[State.DRIFTED]:
            yield _problem(_unfit(found, State.DRIFTED, unfit[State.DRIFTED]))
        if unfit[State.UNSUPPORTED]:
            if any(gates.reviewed_version(patch, found.version).ok for patch in patches):
                yield from _for_others(found, unfit[State.UNSUPPORTED])
            else:
                yield _problem(_unfit(found, State.UNSUPPORTED, unfit[State.UNSUPPORTED]))


def _for_others(found: catalogue.Installed, patches: list[Patch]) -> Iterator[Finding]:
    """Features that are written for other releases than the installed, which others are written for."""
    features: dict[str, list[Patch]] = defaultdict(list)
    for patch in patches:
        features[patch.feature].append(patch)
    for feature, members in features.items():
        releases = ", ".join(sorted({patch.supports for patch in members}))
        yield _note(
            f"{feature} is for {releases}; {found.engine.name} {found.version} is another, and differs where "
            f"{len(members)} patch(es) of it stand. See `python -m atom_patches explain {members[0].id}`."
        )


def _unfit(found: catalogue.Installed, state: State, patches: list[Patch]) -> str:
    ids = [patch.id for patch in patches]
    what = "a version that was not reviewed" if state is State.UNSUPPORTED else "source that has changed since review"
    first = ids[0]
    return (
        f"{found.engine.name} {found.version} has {what} for {len(ids)} patch(es): {', '.join(ids)}. "
        f"See `python -m atom_patches explain {first}`."
    )


# Processes


def _process(process: report.ProcessReport) -> Iterator[Finding]:
    who = f"process {process.pid} ({', '.join(process.roles)})"
    if late.ROLE in process.roles:
        yield _problem(f"{who}: {' '.join(process.notes)}")
    else:
        yield from (_note(f"{who}: {note}") for note in process.notes)
    for kernel in process.kernels:
        yield _note(f"{who}: kernel {kernel.operation} is served by {kernel.provider}: {kernel.reason}")
    for state in (State.FAILED, State.DISPLACED, State.DRIFTED, State.UNSUPPORTED):
        for patch in process.patches:
            if patch.state == state.value:
                yield _problem(f"{who}: {patch.id} is {patch.state}: {patch.reason}")
