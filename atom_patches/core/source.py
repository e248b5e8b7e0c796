"""Find the source that defines a target, from the files alone.

Nothing is imported: importing an engine's module takes seconds and runs its code, and a patch has to be judged
before that. A name may be bound in several branches (`if`, `try`), come from another module
(`from x import y`), or be inherited; every definition that it may have at run time is found.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib.util
import io
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from atom_patches.core.patch import Target, Verdict

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign


class SourceError(LookupError):
    """The installed files do not define the target. The message says which part is missing."""


class Module(NamedTuple):
    """A parsed source file."""

    name: str
    file: str
    package: str
    tree: ast.Module
    lines: tuple[str, ...]


class Found(NamedTuple):
    """One definition of a target."""

    module: Module
    node: Definition


def find(target: Target) -> list[Found]:
    """Every definition that `target` may have.

    Raises:
        SourceError: there is none, or a file cannot be read or parsed.
    """
    return _Search().in_module(target.module, target.qualname.split("."))


def defined(text: str) -> Verdict:
    """Whether the installed files define the target `text`: what a patch asks that may have become unnecessary."""
    try:
        find(Target.parse(text))
    except SourceError as error:
        return Verdict(False, str(error))
    return Verdict(True, f"the engine has {text}")


def mentions(text: str, words: str) -> Verdict:
    """Whether the installed source of the target `text` has `words` in it, comments and line breaks left aside."""
    try:
        found = find(Target.parse(text))
    except SourceError as error:
        return Verdict(False, str(error))
    ok = any(words in ast.unparse(one.node) for one in found)
    return Verdict(ok, f"{text} {'has' if ok else 'lacks'} {words}")


def module_file(name: str) -> Path:
    """The source file of a module, which is not imported, and neither are its parents.

    Raises:
        SourceError: there is no such module, or it has no source file.
    """
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    found = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        found = f"{found}.{part}"
        # By its last name alone: under the whole one, a package without __init__.py asks for its imported parent.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None or found != name or spec.origin is None or not spec.origin.endswith(".py"):
        raise SourceError(f"module {name} is not installed, or has no source file")
    return Path(spec.origin)


def parse(name: str) -> Module:
    """The parsed source of a module.

    Raises:
        SourceError: see `module_file`; or this Python cannot parse the file.
    """
    file = module_file(name)
    stat = os.stat(file)
    return _parse(name, str(file), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _parse(name: str, file: str, mtime_ns: int, size: int) -> Module:
    del mtime_ns, size  # part of the cache's key: an edited file is another file
    text = Path(file).read_text(encoding="utf-8")
    try:
        with _no_collection():
            tree = ast.parse(text, file)
    except SyntaxError as error:
        raise SourceError(f"{file} cannot be parsed: {error}") from error
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    return Module(name, file, package, tree, tuple(lines_of(text)))


@contextlib.contextmanager
def _no_collection() -> Generator[None]:
    """A tree is a hundred thousand new objects and no garbage: collecting meanwhile is most of the time it takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def lines_of(text: str) -> list[str]:
    """The lines of `text` as Python counts them, with their ends: `str.splitlines` also breaks at form feeds."""
    return io.StringIO(text).readlines()


class _Binding(NamedTuple):
    """A statement that binds a name; for an import, which of its names."""

    node: ast.stmt
    alias: ast.alias | None = None


class _Search:
    """One search; remembers where it has been, so that circular imports end."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, tuple[str, ...]]] = set()

    def in_module(self, name: str, path: Sequence[str]) -> list[Found]:
        key = (name, tuple(path))
        if key in self._seen:
            raise SourceError(f"{name}:{'.'.join(path)} is defined by itself")
        self._seen.add(key)
        module = parse(name)
        bound = list(_bindings(module.tree.body, path[0]))
        return self._all(module, bound, path[1:]) if bound else self._indirectly(module, path)

    def _all(self, module: Module, bound: Iterable[_Binding], rest: Sequence[str]) -> list[Found]:
        """The definitions behind all bindings that have any: an optional import that is not installed has none."""
        found: list[Found] = []
        errors: list[SourceError] = []
        for binding in bound:
            try:
                found += self._follow(module, binding, rest)
            except SourceError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return found

    def _follow(self, module: Module, binding: _Binding, rest: Sequence[str]) -> list[Found]:
        node = binding.node
        if binding.alias is not None:
            return self._imported(module, node, binding.alias, rest)
        if isinstance(node, ast.ClassDef) and rest:
            return self._in_class(module, node, rest)
        other_name = _dotted(node.value) if isinstance(node, ast.Assign) else None
        if other_name is not None:
            try:
                return self.in_module(module.name, [*other_name, *rest])
            except SourceError:
                if rest:
                    raise
        if rest or not isinstance(node, Definition):
            raise SourceError(f"{module.file}:{node.lineno} does not say what {'.'.join(rest)} is")
        return [Found(module, node)]

    def _imported(self, module: Module, node: ast.stmt, alias: ast.alias, rest: Sequence[str]) -> list[Found]:
        if not isinstance(node, ast.ImportFrom):
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            if not rest:
                raise SourceError(f"{module.file}:{node.lineno} binds the module {name}, not a definition")
            return self.in_module(name, rest)
        origin = _origin(module, node)
        try:
            return self.in_module(origin, [alias.name, *rest])
        except SourceError:
            if not rest:
                raise
            return self.in_module(f"{origin}.{alias.name}", rest)

    def _in_class(self, module: Module, node: ast.ClassDef, path: Sequence[str]) -> list[Found]:
        bound = list(_bindings(node.body, path[0]))
        if bound:
            return self._all(module, bound, path[1:])
        for base in node.bases:
            name = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            if name is None:
                continue
            try:
                return self.in_module(module.name, [*name, *path])
            except SourceError:
                continue
        what = f"{module.name}:{node.name}.{'.'.join(path)}"
        raise SourceError(f"{what} is not defined, and no base class whose source is known defines it")

    def _indirectly(self, module: Module, path: Sequence[str]) -> list[Found]:
        """A name that no statement binds: a star import's, or a submodule's."""
        for node in _statements(module.tree.body):
            if isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names):
                try:
                    return self.in_module(_origin(module, node), path)
                except SourceError:
                    continue
        if len(path) > 1 and module.package == module.name:
            return self.in_module(f"{module.name}.{path[0]}", path[1:])
        raise SourceError(f"{module.name} ({module.file}) does not define {path[0]}")


def _bindings(body: Iterable[ast.stmt], name: str) -> Iterator[_Binding]:
    """What binds `name` in one scope, its `if`, `try`, `with` and loop blocks included."""
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                yield _Binding(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if name == (alias.asname or _bound_by(node, alias)):
                    yield _Binding(node, alias)
        elif any(isinstance(one, ast.Name) and one.id == name for one in _assigned(node)):
            yield _Binding(node)


def _bound_by(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    return alias.name if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for block in _blocks(node):
                yield from _statements(block)
        else:
            yield node


def _blocks(node: ast.If | ast.Try | ast.With | ast.For | ast.While) -> Iterator[list[ast.stmt]]:
    if not (isinstance(node, ast.If) and (_dotted(node.test) or [""])[-1] == "TYPE_CHECKING"):
        yield node.body
    if isinstance(node, ast.Try):
        yield from (handler.body for handler in node.handlers)
        yield node.finalbody
    if not isinstance(node, ast.With):
        yield node.orelse


def _assigned(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _dotted(node: ast.expr) -> list[str] | None:
    """`["a", "b"]` for the expression `a.b`; None for any other kind of expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else None


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of the module that a `from … import` reads."""
    relative = "." * node.level + (node.module or "")
    return importlib.util.resolve_name(relative, module.package)
