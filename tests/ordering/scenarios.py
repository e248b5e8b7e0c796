"""One process, one import of an engine, every patch that fits it: run by `test_orderings.py`, prints JSON.

    python scenarios.py ENGINE NAME

Each scenario returns {patch id: {check: true or what was found}}; a check that concerns the whole process is filed
under "".
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `forced`; importing it arms, so it waits until it is wanted

NAME = sys.argv[1]
Results = dict[str, dict[str, Any]]


def declared(force: bool = True) -> list[Any]:
    """The patches that fit the engine, wanted by every configuration if `force`."""
    from forced import forced  # pyright: ignore[reportMissingImports]

    from atom_patches import arming
    from atom_patches.core import State, discovery, gates

    if force:
        arming.disarm()  # importing the package arms it; these scenarios have a registry of their own

    found = discovery.load(descriptor())
    patches = [patch for patch in found if gates.fits(descriptor(), patch).state is State.PENDING]
    return [forced(patch) for patch in patches] if force else patches


def descriptor() -> Any:
    """What the package says about the engine."""
    return importlib.import_module(f"atom_patches.{NAME}.engine").ENGINE


def registry_of(patches: list[Any]) -> Any:
    """A registry of its own, armed with `patches`."""
    from atom_patches.core.registry import Registry

    registry = Registry()
    registry.arm(engine(), patches)
    return registry


def configuration() -> Any:
    """A made-up configuration, which all forced patches want."""
    from forced import Config  # pyright: ignore[reportMissingImports]

    return Config()


def engine() -> Any:
    """The engine of the made-up configuration."""
    from forced import undescribed  # pyright: ignore[reportMissingImports]

    return undescribed(descriptor())


def import_targets(patches: list[Any]) -> dict[str, str]:
    """Import every target's module; why those that this machine cannot import failed."""
    failed: dict[str, str] = {}
    for patch in patches:
        try:
            importlib.import_module(patch.site.module)
        except ImportError as error:
            failed[patch.site.module] = f"{type(error).__name__}: {error}"
    return failed


def raw(patch: Any) -> Any:
    """The object at a patch's target, before any descriptor looks at it."""
    owner: Any = sys.modules[patch.site.module]
    *path, name = patch.site.qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner).get(name, "inherited")


def function_of(patch: Any) -> Any:
    from atom_patches.core.site import unwrap

    return unwrap(raw(patch))


def from_this_package(code: Any) -> bool:
    """Whether a code object was compiled from a file of this package, wherever that and the engine are installed."""
    import atom_patches

    return code.co_filename.startswith(f"{os.path.dirname(atom_patches.__file__)}{os.sep}")


def is_ours(patch: Any) -> Any:
    """True if the function at the target was built by a declaration of this package."""
    code = getattr(function_of(patch), "__code__", None)
    return code is None or from_this_package(code) or code.co_filename


def importable(patches: list[Any], failed: dict[str, str]) -> list[Any]:
    return [patch for patch in patches if patch.site.module not in failed]


def states(registry: Any) -> dict[str, str]:
    return {report.id: report.state for report in registry.status(NAME)}


def same_pickle(patch: Any) -> Any:
    """Whether what the target's name gives is found again by that name; a classmethod gives a new object each time."""
    found: Any = sys.modules[patch.site.module]
    for part in patch.site.qualname.split("."):
        found = getattr(found, part)
    if isinstance(found, property):
        return True  # is never pickled: its name leads to itself instead of its function
    return pickle.loads(pickle.dumps(found)) == found


def armed_first() -> Results:
    """Arm, configure, import: everything applies at the import; then twice, pickling and a forked child."""
    patches = declared()
    registry = registry_of(patches)
    config = configuration()
    registry.configure(NAME, config, "engine core")
    before = states(registry)
    failed = import_targets(patches)
    after = states(registry)
    once = {patch.id: raw(patch) for patch in importable(patches, failed)}
    registry.configure(NAME, config, "worker")
    registry.arm(engine(), patches)
    results: Results = {"": {"not importable": failed}}
    for patch in patches:
        if patch.site.module in failed:
            results[patch.id] = {"pending": after[patch.id] == "pending" or after[patch.id]}
            continue
        results[patch.id] = {
            "waited": before[patch.id] in ("pending", "applied") or before[patch.id],
            "applied": after[patch.id] == "applied" or after[patch.id],
            "ours": is_ours(patch),
            "twice is once": raw(patch) is once[patch.id],
            "pickles by name": same_pickle(patch),
        }
    with forked(lambda: {patch.id: is_ours(patch) for patch in importable(patches, failed)}) as child:
        for name, found in child.items():
            results[name]["in a forked child"] = found
    return results


@contextlib.contextmanager
def forked(report: Callable[[], Any]) -> Iterator[Any]:
    """What `report` returns in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(write, "w") as out:
            json.dump(report(), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as source:
        yield json.load(source)
    os.waitpid(pid, 0)


def imported_first() -> Results:
    """Import, arm, configure, revert, again; then each group with each member failing."""
    patches = declared()
    failed = import_targets(patches)
    usable = importable(patches, failed)
    stock = {patch.id: raw(patch) for patch in usable}
    registry = registry_of(patches)
    results: Results = {patch.id: {} for patch in usable}
    for time in ("first", "second"):
        config = configuration()
        registry.configure(NAME, config, "engine core")
        found = states(registry)
        for patch in usable:
            results[patch.id][f"applied the {time} time"] = found[patch.id] == "applied" or found[patch.id]
            results[patch.id][f"ours the {time} time"] = is_ours(patch)
        registry.revert(NAME, bootstrap=time == "second")
        for patch in usable:
            if time == "second" or patch.kind != "bootstrap":
                results[patch.id][f"stock object after revert {time}"] = raw(patch) is stock[patch.id]
    for patch in usable:
        if patch.kind != "bootstrap":
            results[patch.id]["group reverts when it fails"] = reverts(patch, patches, usable, stock)
    return results


def reverts(broken: Any, patches: list[Any], usable: list[Any], stock: dict[str, Any]) -> Any:
    """Whether no member of a patch's group stays when the patch cannot be built."""
    from atom_patches.core import PatchError

    def fail(original: Any) -> Any:
        raise ImportError("forced")

    group = [patch for patch in patches if patch.feature == broken.feature]
    builder, broken.builder = broken.builder, fail
    config = configuration()
    registry = registry_of(group)
    try:
        registry.configure(NAME, config, "engine core")
        return broken.kind != "correctness" or "no error"
    except PatchError as error:
        left = [patch.id for patch in usable if patch in group and raw(patch) is not stock[patch.id]]
        return not left and (f"{broken.id} (" in str(error) or str(error))
    finally:
        broken.builder = builder
        registry.revert(NAME)


def spawned() -> Results:
    """A spawned child is armed by what its parent exported, and finds a patched function by its name."""
    os.environ.pop("ATOM_PATCHES", None)
    import atom_patches  # noqa: F401

    context = multiprocessing.get_context("spawn")
    read, write = context.Pipe(duplex=False)
    child = context.Process(target=in_spawned_child, args=(write,))
    child.start()
    results: Results = json.loads(read.recv())
    child.join()
    return results


def in_spawned_child(out: Any) -> None:
    from atom_patches import arming

    results: Results = {"": {"armed": arming.armed()}}
    for patch in bootstrap():
        importlib.import_module(patch.site.module)
        results[patch.id] = {"ours": is_ours(patch), "pickles by name": same_pickle(patch)}
    out.send(json.dumps(results))


def bootstrap() -> list[Any]:
    """The hooks that take configurations, as they are declared."""
    return [patch for patch in declared(force=False) if patch.kind == "bootstrap"]


def by_id(patches: list[Any], chosen: Any) -> list[tuple[str, Any]]:
    return [(patch.id, patch) for patch in patches if patch.id in chosen]


if __name__ == "__main__":
    sys.modules["scenarios"] = sys.modules["__main__"]
    own = importlib.import_module(f"{NAME}_scenarios")
    scenarios = (armed_first, imported_first, spawned, own.by_plugin, own.instances)
    chosen = {scenario.__name__: scenario for scenario in scenarios}[sys.argv[2]]
    print("RESULT " + json.dumps(chosen()), flush=True)
    os._exit(0)
