"""What each process says about itself: a small state file per process and engine, for `status` to read.

The files lie in a directory that only the user can enter, because `status` believes what they say. A file is
believed only while the process that wrote it lives: a pid alone would be recycled, so the start time that the
kernel reports for it is compared as well.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from atom_patches.core import settings

FORMAT = 2


class StateDirError(RuntimeError):
    """The directory for state files cannot be used safely, or not at all."""


@dataclass(frozen=True)
class PatchReport:
    """One patch in one process: `state` is a value of `core.patch.State`, `reason` is for a person."""

    id: str
    state: str
    reason: str


@dataclass(frozen=True)
class KernelReport:
    """Who serves an operation in one process, and why."""

    operation: str
    provider: str
    reason: str


@dataclass(frozen=True)
class ProcessReport:
    """One process that was handed an engine's configuration.

    Args:
        pid: process id, valid together with `started`.
        started: the kernel's start time of that process in clock ticks, or "" where it cannot be read.
        roles: what the process does for the engine, e.g. `("api server",)`; in-process engines have several.
        engine: `"vllm"`.
        version: the engine's version.
        config: the options that decide about patches, as text.
        patches: every declared patch of the engine.
        notes: surprises that a person should know about.
        kernels: who served the operations that ran, each reason once.
        title: the process's command line as it is now; filled in by the reader.
    """

    pid: int
    started: str
    roles: tuple[str, ...]
    engine: str
    version: str
    config: Mapping[str, str]
    patches: tuple[PatchReport, ...]
    notes: tuple[str, ...] = ()
    kernels: tuple[KernelReport, ...] = ()
    title: str = field(default="", compare=False)


_own: dict[str, ProcessReport] = {}
"""By engine: a process may hold both."""
_kernels: list[KernelReport] = []


def publish(
    *,
    role: str,
    engine: str,
    version: str,
    config: Mapping[str, str],
    patches: Iterable[PatchReport],
    notes: Iterable[str] = (),
) -> Path:
    """Write, or replace, this process's state file about an engine and return its path.

    A process keeps the roles that it published before; everything else is replaced.

    Raises:
        StateDirError: the directory is someone else's, is open to others, or cannot be written.
    """
    if not _own:
        atexit.register(withdraw)
    before = _own.get(engine)
    roles = before.roles if before is not None and before.pid == os.getpid() else ()
    mine = ProcessReport(
        pid=os.getpid(),
        started=start_time(os.getpid()) or "",
        roles=roles if role in roles else (*roles, role),
        engine=engine,
        version=version,
        config=dict(config),
        patches=tuple(patches),
        notes=tuple(notes),
        kernels=tuple(_kernels),
    )
    path = _write_own(mine)
    _own[engine] = mine  # not before: what could not be written once is not tried again in the middle of a step
    return path


def refresh(engine: str, patches: Iterable[PatchReport], notes: Iterable[str] = ()) -> None:
    """Bring this process's state file up to date: patches often apply later, when their module is imported.

    Does nothing in a process that has published nothing about `engine`.

    Raises:
        StateDirError: the file cannot be written.
    """
    if engine not in _own:
        return
    _own[engine] = replace(_own[engine], patches=tuple(patches), notes=tuple(notes))
    _write_own(_own[engine])


def kernel_chosen(operation: str, provider: str, reason: str) -> None:
    """Add who serves an operation to what this process says about itself.

    Raises:
        StateDirError: the process has published a file, and it cannot be written.
    """
    _kernels.append(KernelReport(operation, provider, reason))
    for engine, mine in list(_own.items()):
        if mine.pid == os.getpid():
            _own[engine] = replace(mine, kernels=tuple(_kernels))
            _write_own(_own[engine])


def withdraw() -> None:
    """Remove this process's state files. A forked child leaves its parent's alone."""
    for mine in _own.values():
        if mine.pid == os.getpid():
            with contextlib.suppress(OSError, StateDirError):
                _path(mine).unlink()
    _own.clear()


def processes() -> list[ProcessReport]:
    """Reports of the processes that are alive, by pid and engine. Files of dead processes are removed.

    Raises:
        StateDirError: the directory is someone else's or is open to others, so that its files prove nothing.
    """
    found: list[ProcessReport] = []
    for path in sorted(directory().glob("*.json")):
        report = _read(path)
        if report is None:
            continue
        if not _alive(report):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            continue
        found.append(report)
    return sorted(found, key=lambda report: (report.pid, report.engine))


def directory() -> Path:
    """The private directory for state files, created if it is missing.

    Raises:
        StateDirError: it cannot be made, is not the user's own, or is open to others.
    """
    path = _choose_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StateDirError(_advice(path, f"cannot be created: {error.strerror}")) from error
    if not stat.S_ISDIR(found.st_mode):
        raise StateDirError(_advice(path, "is not a directory"))
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise StateDirError(_advice(path, f"belongs to user {found.st_uid}, not to you ({os.getuid()})"))
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise StateDirError(_advice(path, f"is open to others (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"))
    return path


def start_time(pid: int) -> str | None:
    """When live process `pid` started, in the kernel's clock ticks; None if there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()
    ended = after_name[0] in "ZX"
    return None if ended else after_name[19]


def _choose_directory() -> Path:
    asked = settings.state_dir()
    if asked is not None:
        return asked
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "atom_patches"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"atom_patches-{user}"


def _advice(path: Path, fault: str) -> str:
    return (
        f"the state directory {path} {fault}. Make it your own with mode 0700, "
        "or name another with ATOM_PATCHES_STATE_DIR."
    )


def _path(report: ProcessReport) -> Path:
    return directory() / f"{report.pid}-{report.engine}.json"


def _write_own(report: ProcessReport) -> Path:
    path = _path(report)
    _write(path, {"format": FORMAT} | asdict(report))
    return path


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` in one step, so that a reader sees the old file or the new one."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise StateDirError(_advice(path.parent, f"cannot be written: {error.strerror}")) from error


def _read(path: Path) -> ProcessReport | None:
    """The report in `path`; None if it is gone, or was written by a version with another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if not isinstance(content, dict):
        return None
    fields = cast("dict[str, Any]", content)
    if fields.pop("format", None) != FORMAT:
        return None
    fields["roles"] = tuple(fields["roles"])
    fields["notes"] = tuple(fields["notes"])
    fields["patches"] = tuple(PatchReport(**patch) for patch in fields["patches"])
    fields["kernels"] = tuple(KernelReport(**kernel) for kernel in fields["kernels"])
    fields["title"] = title(fields["pid"])
    return ProcessReport(**fields)


def title(pid: int) -> str:
    """The command line of process `pid` as it is now, which engines set to a telling name; "" if unknown."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return " ".join(sys.argv) if pid == os.getpid() else ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def _alive(report: ProcessReport) -> bool:
    now = start_time(report.pid)
    if now is not None:
        return now == report.started
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(report.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _after_fork() -> None:
    """A forked child starts without a report: it publishes its own once it is handed a configuration."""
    _own.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
