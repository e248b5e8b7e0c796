"""AITER, AMD's kernel library: whether it can be called in this process, and whether a function is the one we know.

AITER has no stable interface: functions move between modules, and parameters are added in the middle. A provider
therefore says of each function which parameters it passes, in which order, and what is found is compared with that
before the first call. What differs is a reason not to use AITER, never an error in use.

None of these bindings has run on AMD hardware. They are written after the call sites that each `Function` names, and
tested against a stand-in that is written after the same (tests/kernels/aiter_stand_in).
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from atom_patches.kernels.registry import YES, Verdict, no

# The architecture that a test's stand-in is taken for; None without one.
_stand_in: str | None = None


def stand_in(architecture: str | None) -> None:
    """Tell the bindings that a stand-in for AITER was put into this process, or (None) taken out of it; for tests."""
    global _stand_in
    _stand_in = architecture
    _check.cache_clear()
    _load.cache_clear()


def available(device_type: str) -> Verdict:
    """Whether tensors on `device_type` can be handed to AITER; AITER is not imported."""
    if _stand_in is None and (device_type != "cuda" or torch.version.hip is None):
        return no("AITER runs on ROCm only")
    if importlib.util.find_spec("aiter") is None:
        return no("the package aiter is not installed")
    return YES


def ocp_e4m3(device: torch.device) -> Verdict:
    """Whether the FP8 of AITER's kernels on this GPU is OCP E4M3: gfx942 has E4M3 FNUZ, of half the range."""
    found = _stand_in or torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    if found.startswith(("gfx95", "gfx12")):
        return YES
    return no(f"AITER's FP8 on {found} is not OCP E4M3")


@dataclass(frozen=True)
class Function:
    """One function of AITER, as a provider calls it.

    Args:
        target: `module:function`.
        positional: the parameters that are passed by position, in AITER's order, which must be its first ones.
        keywords: the parameters that are passed by keyword.
        call_site: public code that calls it in this way, and says or shows what the arguments must look like:
            repository, path and commit.
    """

    target: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    call_site: str = ""

    def verdict(self) -> Verdict:
        """Whether this process's AITER has the function with these parameters; imports AITER when first asked."""
        return _check(self)

    def __call__(self, *args: Any, **kw: Any) -> Any:
        if len(args) != len(self.positional) or not kw.keys() <= set(self.keywords):
            raise TypeError(f"{self.target} is bound as {self.positional} and {self.keywords} by keyword")
        return _load(self.target)(*args, **kw)


def first(*verdicts: Verdict) -> Verdict:
    """The first refusal, or YES."""
    return next((verdict for verdict in verdicts if not verdict.ok), YES)


@functools.cache
def _check(function: Function) -> Verdict:
    module = function.target.partition(":")[0]
    try:
        source = _source(module)
        if source is None:
            return no(f"this AITER has no module {module}")
        signature = signatures(source).get(function.target.partition(":")[2])
        if signature is None:
            return no(f"this AITER has no {function.target}")
        found = compare(function, signature)
        if found.ok:
            _load(function.target)
        return found
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return no(f"{function.target} cannot be imported: {error}")


@functools.cache
def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _source(module: str) -> str | None:
    """The source of a module of AITER; None where there is none of that name.

    The source is read, not the function: AITER's decorators hide signatures behind `*args, **kwargs`.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise
    if spec is None or spec.loader is None:
        return None
    read = getattr(spec.loader, "get_source", None)
    return None if read is None else read(module)


def signatures(source: str) -> dict[str, inspect.Signature]:
    """The signatures of a module's functions, the last definition of a name counting; nothing is evaluated.

    Annotations are text; a default is its value where it is a literal, and a `Symbol` elsewhere.
    """
    found: dict[str, inspect.Signature] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _signature(node)
    return found


@dataclass(frozen=True)
class Symbol:
    """A default that is not a literal."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    spec = node.args
    by_position = [*spec.posonlyargs, *spec.args]
    defaults: list[ast.expr | None] = [None] * (len(by_position) - len(spec.defaults)) + list(spec.defaults)
    parameters = [
        _parameter(argument, default, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for argument, default in zip(by_position, defaults, strict=True)
    ]
    if spec.vararg is not None:
        parameters.append(_parameter(spec.vararg, None, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        _parameter(argument, default, inspect.Parameter.KEYWORD_ONLY)
        for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    if spec.kwarg is not None:
        parameters.append(_parameter(spec.kwarg, None, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = Symbol(ast.unparse(default))
    return inspect.Parameter(argument.arg, kind, default=value)


def compare(function: Function, signature: inspect.Signature) -> Verdict:
    """Whether a call as `function` makes it means what it was written to mean."""
    by_position = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    known = tuple(by_position[: len(function.positional)])
    if known != function.positional:
        return no(f"{function.target} takes {_listed(known)} where {_listed(function.positional)} is passed")
    passed = {*function.positional, *function.keywords}
    unknown = [name for name in function.keywords if name not in signature.parameters]
    if unknown:
        return no(f"{function.target} has no parameter {_listed(unknown)}")
    needed = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in passed
    ]
    if needed:
        return no(f"{function.target} also needs {_listed(needed)}")
    return YES


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return "(" + ", ".join(names) + ")"
