"""The fingerprints that were reviewed: those shipped with the package, and those that the user accepted."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from atom_patches.core import discovery, drift, settings
from atom_patches.core.drift import Fingerprint
from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch, PatchError, Target
from atom_patches.core.source import SourceError


def fingerprints(engine: Engine, target: Target, patch: Patch | None = None) -> dict[str, Fingerprint]:
    """Every reviewed fingerprint of `target`, by the engine version that it was reviewed in.

    Args:
        engine: the engine.
        target: what was reviewed.
        patch: whose review counts. A version whose file lacks one of the patch's targets was not reviewed for it, even
            if `target` was, for another patch that assumes something else about it.

    Raises:
        PatchError: a file of fingerprints cannot be read.
    """
    known: dict[str, Fingerprint] = {}
    for file in sorted(shipped_folder(engine).glob("*.json")):
        content = _read(file)
        entry = content.get(str(target))
        if entry is not None and (patch is None or all(str(one) in content for one in _recorded(patch, content))):
            known[file.stem] = _fingerprint(entry, file)
    accepted = settings.accepted_file()
    for version, entry in _part(_part(_read(accepted), engine.name, accepted), str(target), accepted).items():
        known[f"{version} (accepted)"] = _fingerprint(entry, accepted)
    return known


def accept(engine: Engine, patches: Iterable[Patch], version: str) -> list[Target]:
    """Record, in the user's own file, that the installed source of these patches' targets was reviewed.

    Returns:
        The targets whose source was not known before.

    Raises:
        SourceError: the installed files do not define a target, so there is nothing to accept.
        PatchError: the file cannot be read or written.
    """
    file = settings.accepted_file()
    content = _read(file)
    accepted = dict(_part(content, engine.name, file))
    new: list[Target] = []
    for patch in patches:
        for target in installed(patch):
            current = drift.fingerprint(drift.current_lines(target))
            if target not in new and not is_known(engine, target, current, patch):
                accepted[str(target)] = {**_part(accepted, str(target), file), version: _entry(current)}
                new.append(target)
    if new:
        _write(file, {**content, engine.name: accepted})
    return new


def ship(engine: Engine, patches: Iterable[Patch], version: str, *, complete: bool = False) -> Path:
    """Record, in the package itself, the reviewed source of these patches for an engine version. For developers.

    Args:
        engine: the engine.
        patches: the patches that were reviewed.
        version: the engine's version; a local part (`+cpu`) is left out.
        complete: `patches` are all there are, so other targets' entries go.

    Returns:
        The file that was written.

    Raises:
        SourceError: the installed files do not define a target.
        PatchError: the file cannot be read or written.
    """
    file = shipped_folder(engine) / f"{version.partition('+')[0]}.json"
    content = {} if complete else dict(_read(file))
    for target in dict.fromkeys(target for patch in patches for target in installed(patch)):
        content[str(target)] = _entry(drift.fingerprint(drift.current_lines(target)))
    _write(file, dict(sorted(content.items())))
    return file


def is_known(engine: Engine, target: Target, current: Fingerprint, patch: Patch | None = None) -> bool:
    """Whether this source of `target` was reviewed (for `patch`), in whatever version of the engine."""
    return any(known.hash == current.hash for known in fingerprints(engine, target, patch).values())


def shipped_folder(engine: Engine) -> Path:
    """Where the package keeps the fingerprints of an engine, one file per reviewed version."""
    return discovery.package_folder(engine.declarations) / "fingerprints"


def targets(patch: Patch) -> list[Target]:
    """Everything whose source the patch assumes, in whatever release: its target first."""
    return [patch.site, *_parsed((*patch.relies_on, *itertools.chain(*patch.relies_on_one_of)))]


def assumed(patch: Patch, has: Callable[[Target], bool]) -> list[Target]:
    """What of that it assumes in a release which `has` these targets and no others.

    Of a patch that relies on one of several sets that is the first which is there as a whole; if none is, the first.
    """
    sets = [_parsed(texts) for texts in patch.relies_on_one_of]
    one = next((one for one in sets if all(map(has, one))), sets[0] if sets else [])
    return [patch.site, *_parsed(patch.relies_on), *one]


def installed(patch: Patch) -> list[Target]:
    """What of that it assumes in the installed release."""
    return assumed(patch, _is_installed)


def _recorded(patch: Patch, content: Mapping[str, Any]) -> list[Target]:
    """What of that it assumes in the release whose file this is."""
    return assumed(patch, lambda target: str(target) in content)


def _is_installed(target: Target) -> bool:
    try:
        drift.current_lines(target)
    except SourceError:
        return False
    return True


def _parsed(texts: Iterable[str]) -> list[Target]:
    return [Target.parse(text) for text in texts]


def _entry(fingerprint: Fingerprint) -> dict[str, Any]:
    return {"hash": fingerprint.hash, "lines": list(fingerprint.lines)}


def _fingerprint(entry: Any, file: Path) -> Fingerprint:
    try:
        return Fingerprint(str(entry["hash"]), tuple(map(str, entry["lines"])))
    except (KeyError, TypeError) as error:
        raise PatchError(f"{file} is not a file of fingerprints; remove it, or repair it") from error


def _read(file: Path) -> Mapping[str, Any]:
    try:
        stat = file.stat()
        return _read_once(file, stat.st_mtime_ns, stat.st_size)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PatchError(f"{file} cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=32)
def _read_once(file: Path, mtime_ns: int, size: int) -> Mapping[str, Any]:
    del mtime_ns, size  # part of the cache's key: a changed file is another file
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PatchError(f"{file} is not a file of fingerprints ({error}); remove it, or repair it") from error
    return _part({"": content}, "", file)


def _part(content: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    """The object at `key`, empty if there is none."""
    part = content.get(key, {})
    if not isinstance(part, dict):
        raise PatchError(f"{file} is not a file of fingerprints; remove it, or repair it")
    return cast("dict[str, Any]", part)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Replace `file` in one step. A list of line hashes is one line of text, so that a changed target shows as one."""
    text = re.sub(r"\[[^][]*\]", _on_one_line, json.dumps(content, indent=1))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except OSError as error:
        raise PatchError(f"{file} cannot be written: {error.strerror}") from error


def _on_one_line(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]))
