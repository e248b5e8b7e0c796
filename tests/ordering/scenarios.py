"""One process, one import of vLLM, every declared patch: run by `test_orderings.py`, prints JSON.

    python scenarios.py NAME

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
from typing import Any

Results = dict[str, dict[str, Any]]


class Config:
    """Stands for an engine's configuration; the conditions are forced here."""

    additional_config: dict[str, Any] = {}
    parallel_config = model_config = None


def declared(force: bool = True) -> list[Any]:
    """The patches of vLLM, wanted by every configuration if `force`."""
    from atom_patches import arming
    from atom_patches.core import Patch, Verdict, discovery
    from atom_patches.vllm.engine import ENGINE

    if force:
        arming.disarm()  # importing the package arms it; these scenarios have a registry of their own

    def forced(patch: Patch) -> Patch:
        facts = {name: getattr(patch, name) for name in FACTS}
        if patch.kind != "bootstrap":
            facts["when"] = lambda config: Verdict(config is not None, "forced")
        copy = Patch(**facts)
        copy.builder = patch.builder
        return copy

    patches = discovery.load(ENGINE)
    return [forced(patch) for patch in patches] if force else patches


FACTS = (
    "id",
    "target",
    "supports",
    "kind",
    "group",
    "when",
    "relies_on",
    "upstream",
    "upstreamed",
    "changes_graph",
    "order",
)


def engine() -> Any:
    import dataclasses

    from atom_patches.vllm.engine import ENGINE

    return dataclasses.replace(ENGINE, describe=lambda config: {}, bind_cache_key=lambda config, active: None)


def registry_of(patches: list[Any]) -> Any:
    """A registry of its own, armed with `patches`."""
    from atom_patches.core.registry import Registry

    registry = Registry()
    registry.arm(engine(), patches)
    return registry


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
    return {report.id: report.state for report in registry.status("vllm")}


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
    config = Config()
    registry.configure("vllm", config, "engine core")
    before = states(registry)
    failed = import_targets(patches)
    after = states(registry)
    once = {patch.id: raw(patch) for patch in importable(patches, failed)}
    registry.configure("vllm", config, "worker")
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
        config = Config()
        registry.configure("vllm", config, "engine core")
        found = states(registry)
        for patch in usable:
            results[patch.id][f"applied the {time} time"] = found[patch.id] == "applied" or found[patch.id]
            results[patch.id][f"ours the {time} time"] = is_ours(patch)
        registry.revert("vllm", bootstrap=time == "second")
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
    config = Config()
    registry = registry_of(group)
    try:
        registry.configure("vllm", config, "engine core")
        return broken.kind != "correctness" or "no error"
    except PatchError as error:
        left = [patch.id for patch in usable if patch in group and raw(patch) is not stock[patch.id]]
        return not left and (f"{broken.id} (" in str(error) or str(error))
    finally:
        broken.builder = builder
        registry.revert("vllm")


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

    armed = arming.armed()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    functions = {
        "vllm.bootstrap.engine_args": EngineArgs.create_engine_config,
        "vllm.bootstrap.engine_core": EngineCore.__init__,
        "vllm.bootstrap.engine_core_shutdown": EngineCore.shutdown,
        "vllm.bootstrap.worker": WorkerWrapperBase.init_worker,
    }
    results: Results = {"": {"armed": armed}}
    for name, function in functions.items():
        results[name] = {
            "ours": from_this_package(function.__code__),
            "pickles by name": pickle.loads(pickle.dumps(function)) is function,
        }
    out.send(json.dumps(results))


def by_plugin() -> Results:
    """Armed by vLLM's own platform plugin, in the middle of the import of the modules that take configurations."""
    os.environ.pop("ATOM_PATCHES", None)
    os.environ["VLLM_PLUGINS"] = "atom"
    results: Results = {"": {"armed before": "atom_patches" in sys.modules}}
    from vllm.v1.engine.core import EngineCore

    results["vllm.bootstrap.engine_core"] = {"ours": from_this_package(EngineCore.__init__.__code__)}
    results["vllm.bootstrap.engine_core_shutdown"] = {"ours": from_this_package(EngineCore.shutdown.__code__)}
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    results["vllm.bootstrap.worker"] = {"ours": from_this_package(WorkerWrapperBase.init_worker.__code__)}
    from vllm.engine.arg_utils import EngineArgs

    results["vllm.bootstrap.engine_args"] = {"ours": from_this_package(EngineArgs.create_engine_config.__code__)}
    return results


TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


class Hashed:
    """A user's own `additional_config` object."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compute_hash(self) -> str:
        return self.text


def real_configuration(folder: str, ranks: int, additional: Any = None) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=folder,
        enforce_eager=True,
        max_model_len=64,
        prefill_context_parallel_size=ranks,
        skip_tokenizer_init=True,
        **({} if additional is None else {"additional_config": additional}),
    )
    return args.create_engine_config()


def instances() -> Results:
    """Real configurations, through the real hook: pcp=2, then pcp=1 in the same process; and the compile-cache key."""
    import tempfile

    import atom_patches  # noqa: F401
    from atom_patches.core.registry import REGISTRY

    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(TINY, file)
    patches = declared(force=False)
    import_targets(patches)
    stock = {patch.id: raw(patch) for patch in patches if patch.kind != "bootstrap"}

    one = real_configuration(folder, 1)
    results: Results = {name: {"stock at first": raw(patch) is stock[name]} for name, patch in by_id(patches, stock)}
    stock_hash, untouched = one.compute_hash(), one.additional_config == {}
    del one

    two = real_configuration(folder, 2)
    on = {name for name, state in states(REGISTRY).items() if state == "applied" and name in stock}
    for name, patch in by_id(patches, stock):
        results[name]["on if applied"] = (raw(patch) is not stock[name]) == (name in on)
    results[""] = cache_key(two, {"patches on": len(on) > 10 or sorted(on), "untouched when off": untouched})

    del two
    one = real_configuration(folder, 1)
    for name, patch in by_id(patches, stock):
        results[name]["stock again"] = raw(patch) is stock[name]
    results[""]["key is the stock one again"] = one.compute_hash() == stock_hash
    results[""] |= user_objects(folder)
    return results


def cache_key(config: Any, results: dict[str, Any]) -> dict[str, Any]:
    """The key of a patched configuration: other than without, equal in a child, equal when bound again."""
    from atom_patches.vllm.engine import bind_cache_key

    key, active = config.compute_hash(), config.additional_config["atom_patches"]
    results["equal in a child"] = pickle.loads(pickle.dumps(config)).compute_hash() == key
    bind_cache_key(config, active)
    results["bound twice"] = config.compute_hash() == key
    bind_cache_key(config, {})
    results["differs from the unpatched"] = config.compute_hash() != key
    bind_cache_key(config, {**active, "vllm.other": "1"})
    results["differs with another patch"] = config.compute_hash() != key
    bind_cache_key(config, {name: "other" for name in active})
    results["differs with other code"] = config.compute_hash() != key
    bind_cache_key(config, active)
    return results


def user_objects(folder: str) -> dict[str, Any]:
    """A user's dictionary is not written to; a user's object keeps its hash's say."""
    mine = {"gdn_prefill_backend": "auto"}
    first = real_configuration(folder, 2, mine)
    results: dict[str, Any] = {
        "dictionary untouched": mine == {"gdn_prefill_backend": "auto"},
        "dictionary passed on": first.additional_config["gdn_prefill_backend"] == "auto",
    }
    keys = [real_configuration(folder, 2, Hashed(text)) for text in ("a", "a", "b")]
    hashes = [config.compute_hash() for config in keys]
    results["object's hash counts"] = hashes[0] == hashes[1] != hashes[2]
    results["object's attributes"] = keys[0].additional_config.text == "a"
    results["object pickles"] = pickle.loads(pickle.dumps(keys[0])).compute_hash() == hashes[0]
    return results


def by_id(patches: list[Any], chosen: Any) -> list[tuple[str, Any]]:
    return [(patch.id, patch) for patch in patches if patch.id in chosen]


SCENARIOS = (armed_first, imported_first, spawned, by_plugin, instances)

if __name__ == "__main__":
    chosen = {scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]
    print("RESULT " + json.dumps(chosen()), flush=True)
    os._exit(0)
