"""Where the tools keep what they build: outside the checkout, shared by all checkouts, named by content."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cache_root() -> Path:
    """atom_patches under the user's cache directory: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().resolve() / "atom_patches"


def content_hash(files: Iterable[Path], *words: str) -> str:
    """Twelve hex digits that change with any of the files' bytes or the words."""
    digest = hashlib.sha256()
    for part in [*(path.read_bytes() for path in files), *(word.encode() for word in words)]:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:12]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` as a lock file; a second process waits, and a process that dies lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
