"""Hold every patch against every release: does it apply there, is it needed, or does the overlay say no?

    python tools/matrix.py              # read all releases, test those that can be installed, update the document
    python tools/matrix.py --read       # the same without the tests
    python tools/matrix.py --check      # exit status 1 if docs/compatibility.md says something else than the records
    python tools/matrix.py --against vllm=../vllm    # exit status 1 if a patch stands elsewhere there than on the
                                                     # newest release

A release is read from its sources, without a GPU and without importing it (see tools/lanes.py); what was found is kept
in envs/lanes, so that the document can be checked anywhere. Where a release can be installed, or another one's compiled
operators stand in for its own (see tools/stand_in.py), tests/ordering and tests/drift run on it: every patch that fits
is applied and taken back, and drills of changed sources are held. Engines of two ranks run, too, if vLLM's model runner
has a manager of prefill context parallelism. Of vLLM, its own unit tests run as well, with the patches in their places
(see tools/engine_tests.py).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import engine_tests  # noqa: E402
import lanes  # noqa: E402
from generated import Part  # noqa: E402
from lanes import LANES, Lane  # noqa: E402

from atom_patches.core import Engine, Patch, discovery, reviewed  # noqa: E402

DOCUMENT = ROOT / "docs" / "compatibility.md"
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
TESTS = ("tests/ordering", "tests/drift", "tests/vllm/test_pcp_manager.py", "tests/vllm/test_pcp_manager_rows.py")
#: On one release besides, tests with a few real engines: a feature that is served there, and tested in full elsewhere.
HYBRID = "tests/sglang/test_atom_models.py"
ALSO = {
    "sglang-0.5.23": (
        "tests/sglang/test_releases.py",
        "tests/sglang/test_model_choice.py",
        "tests/sglang/test_atom_models_dense.py",
        f"{HYBRID}::test_every_answer_is_the_oracle_s[vision dp2]",
        f"{HYBRID}::test_our_class_ran_all_of_its_layers_in_every_step[vision dp2]",
        f"{HYBRID}::test_an_idle_rank_runs_one_row_that_is_no_request_s[vision dp2]",
    )
}
#: Two features that serve the same option, each on its own releases.
INSTEAD = {"vllm.pcp": "vllm.pcp_manager", "vllm.pcp_manager": "vllm.pcp"}
OWN_TESTS = "engine_tests"
"""In a record: what the release's own tests said."""


class Cell(NamedTuple):
    """Where one patch stands on one release."""

    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.detail}" if self.detail else self.state


@functools.cache
def engine(name: str) -> Engine:
    """What the package says about an engine."""
    return importlib.import_module(f"atom_patches.{name}.engine").ENGINE


@functools.cache
def patches(name: str) -> tuple[Patch, ...]:
    """The declared patches of an engine, groups together."""
    return tuple(sorted(discovery.load(engine(name)), key=lambda patch: (patch.kind != "bootstrap", patch.id)))


def recorded(lane: Lane) -> dict[str, Any]:
    """What was found in a release; nothing if it was never read."""
    try:
        return json.loads(lane.record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def cell(lane: Lane, patch: Patch, record: Mapping[str, Any]) -> Cell:
    """Where a patch stands on a release, from what was found there and from what was reviewed."""
    targets = reviewed.targets(patch)
    found: Mapping[str, str | None] = record.get("targets", {})
    if any(str(target) not in found for target in targets):
        return Cell("unknown", "run `make matrix`")
    if patch.id in record["upstreamed"]:
        return Cell("upstreamed")
    targets = reviewed.assumed(patch, lambda target: found[str(target)] is not None)
    gone = [target for target in targets if found[str(target)] is None]
    known = {target: reviewed.fingerprints(engine(lane.engine), target, patch).values() for target in targets}
    changed = [
        target for target in targets if target not in gone and found[str(target)] not in {k.hash for k in known[target]}
    ]
    if targets[0] in gone:
        return Cell("moved")
    # Hooks that hand the configuration over apply whatever their target looks like.
    if not gone and not changed or patch.kind == "bootstrap":
        ran = "ran" if lane.is_packaged else "ran, stand-in"
        return Cell("applies", ran if patch.id in record.get("ran", ()) else "read")
    return Cell("unsupported", f"{len(gone) + len(changed)} of {len(targets)} changed")


def outcome(kinds: Iterable[str], cells: Sequence[Cell]) -> str:
    """What a launch that asks for a group of patches gets."""
    states = {one.state for one in cells}
    if states == {"upstreamed"}:
        return "the engine's own"
    if states <= {"upstreamed", "applies"}:
        return "served"
    if "unknown" in states:
        return "unknown"
    return "stopped" if "correctness" in kinds else "stock, one warning"


def grid(name: str) -> dict[str, dict[str, Cell]]:
    """Patch id -> release -> cell."""
    records = {lane.version: (lane, recorded(lane)) for lane in LANES if lane.engine == name}
    return {
        patch.id: {version: cell(lane, patch, record) for version, (lane, record) in records.items()}
        for patch in patches(name)
    }


def tables() -> str:
    """All tables in Markdown."""
    parts: list[str] = []
    for name, title in TITLES.items():
        cells = grid(name)
        parts += [f"### {title}, by feature", "", *_features(name, cells), ""]
        parts += [f"### {title}, by patch", "", *_patches(name, cells), ""]
        parts += [*_own(name, title)]
    return "\n".join([*parts, "### AITER, by family of kernels", "", *_aiter()])


def _own(name: str, title: str) -> Iterator[str]:
    """How many of an engine's own tests pass with the patches in their places, and which those call."""
    rows = [
        (lane, record[OWN_TESTS]) for lane in LANES if lane.engine == name and OWN_TESTS in (record := recorded(lane))
    ]
    if rows:
        yield from (f"### {title}'s own unit tests", "")
        yield from _head("release", ["pass with every patch in its place, as without", "patches that they call"])
        for lane, found in rows:
            called = ", ".join(f"`{patch}`" for patch in found["called"])
            yield f"| {lane.version} | {found['passed']} | {called} |"
        yield ""


def _aiter() -> Iterator[str]:
    """How many of the functions that a family calls each recorded AITER has, with the parameters that it passes."""
    import aiter_signatures  # the kernels need torch; what only compares engines does without

    states = aiter_signatures.states()
    yield from _head("family", list(states))
    first = 0
    for family, functions in aiter_signatures.bound_functions().items():
        last = first + len(functions)
        row = [f"{found[first:last].count('yes')} of {len(functions)}" for found in states.values()]
        yield f"| `{family}` | {' | '.join(row)} |"
        first = last


def _features(name: str, cells: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    versions = [lane.version for lane in LANES if lane.engine == name]
    yield from _head("feature", versions)
    groups: dict[str, list[Patch]] = {}
    for patch in patches(name):
        if patch.kind != "bootstrap":
            groups.setdefault(patch.feature, []).append(patch)
    rows: dict[str, list[str]] = {}
    for feature, members in sorted(groups.items()):
        kinds = {patch.kind for patch in members}
        rows[feature] = [outcome(kinds, [cells[patch.id][version] for patch in members]) for version in versions]
    for feature, row in rows.items():
        other = rows.get(INSTEAD.get(feature, ""), row)
        told = [
            f"`{INSTEAD[feature]}` instead" if (one, another) == ("stopped", "served") else one
            for one, another in zip(row, other, strict=True)
        ]
        yield f"| `{feature}` | {' | '.join(told)} |"


def _patches(name: str, cells: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    versions = [lane.version for lane in LANES if lane.engine == name]
    yield from _head("patch", versions)
    for patch in patches(name):
        yield f"| `{patch.id}` | {' | '.join(str(cells[patch.id][version]) for version in versions)} |"


def _head(first: str, versions: Sequence[str]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(versions)} |"
    yield "|---|" + "---|" * len(versions)


PART = Part(DOCUMENT, "matrix", tables)


def renew(lane: Lane, tested: bool) -> None:
    """Read a release, and run the tests on it where it can be installed; its record says what was found.

    Raises:
        SystemExit: a patch stands elsewhere than the record implies, or a test failed.
    """
    found = lanes.read(lane)
    states: dict[str, str] = found.pop("states")
    before = recorded(lane)
    found["ran"] = [
        patch.id for patch in patches(lane.engine)
        if patch.id in before.get("ran", ()) and all(
            before["targets"].get(str(target)) == found["targets"][str(target)] for target in reviewed.targets(patch)
        )
    ]  # fmt: skip
    if tested and lane.has_environment:
        _test(lane)
        found["ran"] = [patch.id for patch in patches(lane.engine) if states[patch.id] == "pending"]
        if lane.name in engine_tests.ARCHIVES:
            found[OWN_TESTS] = _own_tests(lane)
    elif OWN_TESTS in before:
        found[OWN_TESTS] = before[OWN_TESTS]
    for patch in patches(lane.engine):
        implied, state = cell(lane, patch, found).state, states[patch.id]
        fits = {"pending": implied in ("applies", "moved"), "upstreamed": implied == "upstreamed"}
        if not fits.get(state, implied in ("moved", "unsupported")):
            raise SystemExit(f"matrix: {patch.id} is {state} on {lane.name}, but its record says {implied}")
    lane.record.parent.mkdir(exist_ok=True)
    lane.record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def against(name: str, folder: Path) -> list[str]:
    """What differs between the newest release that was read and the sources below `folder`, in Markdown."""
    lane = [lane for lane in LANES if lane.engine == name][-1]
    found, newest = lanes.read_folder(name, folder), recorded(lane)
    lines: list[str] = []
    for patch in patches(name):
        before, now = cell(lane, patch, newest), cell(lane, patch, found)
        if before.state != now.state:
            changed = [
                f"`{target}`" for target in reviewed.targets(patch)
                if newest["targets"].get(str(target)) != found["targets"][str(target)]
            ]  # fmt: skip
            lines.append(f"- `{patch.id}`: {before.state} on {lane.version}, {now.state} here ({', '.join(changed)})")
    return lines


def _test(lane: Lane) -> None:
    chosen = (*TESTS, *ALSO.get(lane.name, ()))
    command = [str(lanes.environment(lane)), "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-300:]]
    print(f"{lane.name}: {' '.join(chosen)}: {last[0]}", flush=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\nmatrix: tests fail on {lane.name}")


def _own_tests(lane: Lane) -> dict[str, Any]:
    result = engine_tests.run(lane)
    print(f"{lane.name}: {result}", flush=True)
    if result.different or not result.called:
        raise SystemExit("\n  ".join([f"matrix: patches are seen by {lane.name}'s own tests", *result.different]))
    return {"passed": result.passed, "called": list(result.called)}


def summary() -> Iterator[str]:
    """One line a release, and the last line."""
    import aiter_signatures

    unknown = 0
    for lane in LANES:
        counted = Counter(cells[lane.version].state for cells in grid(lane.engine).values())
        unknown += counted["unknown"]
        told = ", ".join(f"{number} {state}" for state, number in sorted(counted.items()))
        yield f"{lane.name} ({_how(lane)}): {told}"
    for name, states in aiter_signatures.states().items():
        yield f"aiter {name} (signatures): {states.count('yes')} of {len(states)} functions as the bindings call them"
    count = sum(len(patches(name)) for name in TITLES)
    yield f"matrix: {len(LANES) + len(aiter_signatures.states())} lanes, {count} patches, {unknown} unknown"


def _how(lane: Lane) -> str:
    """What there is of a release."""
    if lane.is_packaged:
        return "installed"
    release = lane.stood_in_for
    return "sources only" if release is None else f"its Python on {release.over}'s compiled operators"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", action="store_true", help="read the releases, and run no tests")
    parser.add_argument("--check", action="store_true", help="compare docs/compatibility.md with the records")
    parser.add_argument("--only", metavar="LANE", help="one release, e.g. vllm-0.32.0")
    parser.add_argument("--against", metavar="ENGINE=FOLDER", help="sources to compare with the newest release")
    arguments = parser.parse_args()
    if arguments.against:
        name, _, folder = arguments.against.partition("=")
        if name not in TITLES or not (Path(folder) / name).is_dir():
            parser.error(f"--against wants ENGINE=FOLDER, with FOLDER/ENGINE there; got {arguments.against}")
        differences = against(name, Path(folder).resolve())
        print("\n".join(differences) or "Every patch stands where it stands on the newest release.")
        return 1 if differences else 0
    if arguments.check:
        return PART.check("make matrix")
    chosen = [lane for lane in LANES if arguments.only in (None, lane.name)]
    if not chosen:
        parser.error(f"no lane {arguments.only}; known: {', '.join(lane.name for lane in LANES)}")
    for lane in chosen:
        renew(lane, tested=not arguments.read)
    PART.write()
    lines = list(summary())
    print(tables(), "", *lines, sep="\n")
    return 0 if lines[-1].endswith(" 0 unknown") else 1


if __name__ == "__main__":
    sys.exit(main())
