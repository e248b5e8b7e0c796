"""A stand-in for AITER, AMD's kernel library, which no machine of ours can run.

`installed(lane)` puts a package `aiter` into `sys.modules` with the functions that the bindings call, under the
signatures that AITER has in that lane (`signatures-<lane>.json`, see tools/aiter_signatures.py), and takes it out
again. Like AITER's own, its functions hide their signatures behind `*args, **kwargs`.

A call is bound with the recorded signature and then handed to the function's contract (`contracts_*.py`), which checks
every argument as AITER's sources and documented call sites demand, and computes with plain torch where the real
function would write. Contracts are written from AITER's side: nothing in them is taken from the bindings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from atom_patches.kernels import aiter_binding, registry

from .checks import CONTRACTS, Arguments, Violation

FOLDER = Path(__file__).parent
#: The newest last.
LANES = ("0.1.7.post2.dev18", "2026-08")
NEWEST = LANES[-1]

#: What every call of the stand-in is handed to, if set: target, contract, bound arguments by parameter name.
Observer = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
_observers: list[Observer] = []


@functools.cache
def recorded(lane: str) -> dict[str, inspect.Signature]:
    """`module:function` -> its signature in that lane."""
    texts = json.loads((FOLDER / f"signatures-{lane}.json").read_text(encoding="utf-8"))["signatures"]
    return {target: aiter_binding.signatures(f"def f{text}: ...")["f"] for target, text in texts.items()}


@contextlib.contextmanager
def installed(
    lane: str = NEWEST, architecture: str = "gfx950", changed: dict[str, inspect.Signature | None] | None = None
) -> Iterator[None]:
    """For the duration, `import aiter` finds the stand-in, and the bindings take this process for one on ROCm.

    Args:
        changed: functions that have another signature than the lane's, or (None) are missing.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        raise RuntimeError("a stand-in for aiter is installed already")
    signatures = recorded(lane) | (changed or {})
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_aiter(name)}
    finder = _Finder({target: signature for target, signature in signatures.items() if signature is not None})
    sys.meta_path.insert(0, finder)
    _forget(architecture)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_aiter(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
        _forget(None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """For the duration, every call passes through `observer`, which returns the arguments to go on with."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _forget(architecture: str | None) -> None:
    aiter_binding.stand_in(architecture)
    registry._available.cache_clear()


def _is_aiter(name: str) -> bool:
    return name == "aiter" or name.startswith("aiter.")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and makes the modules of one lane."""

    def __init__(self, signatures: dict[str, inspect.Signature]) -> None:
        self.signatures = signatures
        modules = {target.partition(":")[0] for target in signatures}
        self.packages = {"aiter"}
        for module in modules:
            parts = module.split(".")
            self.packages |= {".".join(parts[:n]) for n in range(1, len(parts))}
        self.modules = modules | self.packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.modules:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=fullname in self.packages)

    def is_package(self, fullname: str) -> bool:
        return fullname in self.packages

    def get_source(self, fullname: str) -> str:
        return "\n".join(
            f"def {target.partition(':')[2]}{signature}: ..."
            for target, signature in self.signatures.items()
            if target.partition(":")[0] == fullname
        )

    def exec_module(self, module: ModuleType) -> None:
        for target, signature in self.signatures.items():
            home, _, name = target.partition(":")
            if home == module.__name__:
                setattr(module, name, _function(target, signature))


def _function(target: str, signature: inspect.Signature) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        for observer in _observers:
            args, kwargs = observer(target, args, kwargs)
        bound = signature.bind(*args, **kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        contract = CONTRACTS.get(target)
        if contract is None:
            raise Violation(f"{target} has no contract")
        uncovered = given - contract.parameters
        if uncovered:
            raise Violation(f"{target}: the contract says nothing of {sorted(uncovered)}")
        return contract.function(Arguments(target, bound.arguments))

    return function


from . import (  # noqa: E402, F401
    contracts_attention,
    contracts_conv,
    contracts_gdn,
    contracts_indexer,
    contracts_moe,
    contracts_norm,
    contracts_rope,
)
