"""The declaration of one patch: facts as data, behaviour as one plain function.

Nothing here touches an engine. A declaration is read by `core.registry`, which decides about it, applies it
and takes it back.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["bootstrap", "correctness", "optimisation"]
Builder = Callable[[Any], Any]

_ID = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class PatchError(RuntimeError):
    """A patch that has to be applied cannot be. The message says what was found, what is needed, what to do.

    When nothing catches it, the process ends with that message alone (see `core.stop`).
    """


class State(str, enum.Enum):
    """Where a patch stands in this process. Every state comes with a reason that a person can act on."""

    PENDING = "pending"  # wanted, or not decided yet; its module or a configuration is still to come
    OFF = "off"  # switched off by the environment
    INACTIVE = "inactive"  # the configuration does not ask for it, or its group is held back
    UNSUPPORTED = "unsupported"  # unreviewed engine version, and unreviewed source
    DRIFTED = "drifted"  # a reviewed version, but the source is not the one that was reviewed
    UPSTREAMED = "upstreamed"  # the engine already behaves this way
    APPLIED = "applied"
    DISPLACED = "displaced"  # applied, and replaced by someone else afterwards
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


class Verdict(NamedTuple):
    """An answer and the reason for it.

    Attributes:
        asked: with `ok` false: somebody asked for it, and the engine goes on without; so it says why, once.
    """

    ok: bool
    reason: str
    asked: bool = False


class Target(NamedTuple):
    """A place in an engine: `module` is importable, `qualname` is a dotted path below it."""

    module: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `package.module:Class.method`.

        Raises:
            ValueError: the text has another form.
        """
        if not _TARGET.fullmatch(text):
            raise ValueError(f"a target is written module:qualname, got {text!r}")
        module, _, qualname = text.partition(":")
        return cls(module, qualname)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(eq=False, kw_only=True)
class Patch:
    """One replacement of one engine function.

    Args:
        id: dotted name; equal to the declaring module's name without `atom_patches.`.
        target: `module:qualname` of a function, method, classmethod, staticmethod, property or module-level name.
        supports: PEP 508 requirement, the engine versions that were reviewed: `"vllm>=0.20.2,<0.21"`.
        kind: `correctness`: the configuration cannot run right without it, so the launch stops if it cannot be
            applied; `optimisation`: stock behaviour and one warning instead; `bootstrap`: hands a configuration
            to the registry, always on.
        group: patches that are applied together or not at all; None: a group of its own.
        when: decides from the engine's configuration, once per engine instance, whether the patch is wanted.
            None: wanted as soon as the target is imported, before any configuration exists.
        relies_on: further targets whose source the patch assumes; fingerprinted like the target.
        relies_on_one_of: where releases do the same in different places, and the patch fits either: sets of further
            targets, of which it assumes one, whole: the first that an engine has.
        upstream: the upstream change that makes the patch unnecessary, or why there is none.
        upstreamed: given the engine's version, says whether the engine already behaves this way.
        changes_graph: compiled graphs differ with the patch, so it enters the engine's compile-cache key.
        graph_settings: variables of this package by whose values they differ, too.
        order: position among patches of one target or one group, smallest first (innermost); ties by id.
    """

    id: str
    target: str
    supports: str
    kind: Kind
    group: str | None = None
    when: Callable[[Any], Verdict] | None = None
    relies_on: tuple[str, ...] = ()
    relies_on_one_of: tuple[tuple[str, ...], ...] = ()
    upstream: str = ""
    upstreamed: Callable[[str], Verdict] | None = None
    changes_graph: bool = False
    graph_settings: tuple[str, ...] = ()
    order: int = 0
    builder: Builder | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"patch id {self.id!r}: use dotted lower-case names, e.g. vllm.pcp.block_table")
        if self.kind not in get_args(Kind):
            raise ValueError(f"patch {self.id}: kind is one of {get_args(Kind)}, got {self.kind!r}")
        for text in (self.target, *self.relies_on, *itertools.chain(*self.relies_on_one_of)):
            Target.parse(text)

    def around(self, builder: Builder) -> Builder:
        """Declare the replacement: `builder` gets the original and returns what takes its place.

        The original is the raw function, taken out of a classmethod, staticmethod or property. The builder may
        be called again when another patch of the same target comes or goes, so it keeps no state of its own.
        """
        self.builder = builder
        return builder

    @property
    def site(self) -> Target:
        """The target, parsed."""
        return Target.parse(self.target)

    @property
    def feature(self) -> str:
        """What the environment switches: the group, or the patch itself."""
        return self.group or self.id

    @property
    def sort_key(self) -> tuple[int, str]:
        """Order of application, innermost first."""
        return self.order, self.id
