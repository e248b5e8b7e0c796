"""Record every collective that this process enters: operation, group, shape, type, and the line that asked for it.

    with recording() as recorder:
        ...                        # any engine's step
        entries = recorder.cut()   # what was entered since the last cut

All of torch.distributed, and every engine that stands on it, ends in a method of ProcessGroup: those are wrapped, so it
does not matter how a module imported torch.distributed, and an object that is broadcast shows as the tensors that it is
sent as. What doesn't pass there (a library's own NCCL communicator, shared memory between processes, functional
collectives in a compiled graph) is recorded with `watch`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

OWN = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.abspath(dist.__file__)))
FRAMES = 3


@dataclass(frozen=True)
class Entry:
    """One collective, or one message between two ranks, that this rank entered.

    Attributes:
        operation: ProcessGroup's name of it; "send" and "recv" are messages.
        group: the group's name, the same on all its ranks.
        ranks: the group's members, as global ranks.
        shape, dtype: this rank's share, or empty for an operation without one.
        agreed: what all ranks must agree on besides: the reduction, the root, the tag.
        peer: the other end of a message, as a global rank.
        sent, received: rows to and from each member, where they may differ.
        site: the innermost lines outside torch.distributed; for people.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dtype: str = ""
    agreed: tuple[str, ...] = ()
    peer: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    site: str = ""

    def __str__(self) -> str:
        what = f"{self.operation} {list(self.shape)} {self.dtype}".rstrip()
        notes = [*self.agreed, *([f"with rank {self.peer}"] if self.peer is not None else [])]
        if self.sent or self.received:
            notes.append(f"rows {list(self.sent)} out, {list(self.received)} in")
        return f"{what} in {self.group} of {list(self.ranks)}" + (f" ({', '.join(notes)})" if notes else "")


class Recorder:
    """Keeps what was entered; another thread may look while this one waits in a collective."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._inside = threading.local()

    def enter(self, entry: Entry) -> None:
        self._entries.append(entry)

    def cut(self) -> list[Entry]:
        """Hand over what was entered since the last cut."""
        entries, self._entries = self._entries, []
        return entries

    def peek(self) -> list[Entry]:
        return list(self._entries)

    @contextlib.contextmanager
    def outermost(self) -> Iterator[bool]:
        """Whether this call is not part of another one that is recorded already."""
        outer: bool = not getattr(self._inside, "busy", False)
        self._inside.busy = True
        try:
            yield outer
        finally:
            if outer:
                self._inside.busy = False


Describe = Callable[..., dict[str, Any]]


def _first(tensors: Any) -> torch.Tensor:
    while not isinstance(tensors, torch.Tensor):
        tensors = tensors[0]
    return tensors


def _share(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _options(options: Sequence[Any]) -> dict[str, Any]:
    agreed: list[str] = []
    for option in options:
        if hasattr(option, "reduceOp"):
            agreed.append(_reduction(option.reduceOp))
        if hasattr(option, "rootRank"):
            agreed.append(f"root {option.rootRank}")
    return {"agreed": tuple(agreed)}


def _reduction(operation: Any) -> str:
    """`RedOpType.SUM` of an object that prints as its address."""
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
        if operation == getattr(dist.ReduceOp, name):
            return name.lower()
    return "reduction"


def _whole(tensors: Any, *options: Any, **_: Any) -> dict[str, Any]:
    """The first argument has one shape on all ranks: what each brings, or what each gets."""
    return _share(_first(tensors)) | _options(options)


def _second(_: Any, tensors: Any, *options: Any, **__: Any) -> dict[str, Any]:
    """The first argument is where the answer goes; the second, what each rank brings, has one shape on all ranks."""
    return _share(_first(tensors)) | _options(options)


def _splits(output: torch.Tensor, tensor: torch.Tensor, received: Any, sent: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """One tensor each way; rows may differ by rank, the rest of the shape may not."""
    rest = {"shape": tuple(tensor.shape[1:]), "dtype": _share(tensor)["dtype"]}
    if not received and not sent:
        return rest | {"shape": tuple(tensor.shape)}
    return rest | {"sent": tuple(sent), "received": tuple(received)}


def _lists(outputs: Any, tensors: Any, *_: Any, **__: Any) -> dict[str, Any]:
    share = _share(tensors[0])
    rows = lambda items: tuple(item.shape[0] if item.dim() else 1 for item in items)  # noqa: E731
    return share | {"shape": share["shape"][1:], "sent": rows(tensors), "received": rows(outputs)}


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


COLLECTIVES: dict[str, Describe] = {
    "allreduce": _whole,
    "allreduce_coalesced": _whole,
    "broadcast": _whole,
    "reduce": _whole,
    "allgather": _second,
    "allgather_coalesced": _second,
    "allgather_into_tensor_coalesced": _second,
    "_allgather_base": _second,
    "gather": _second,
    "scatter": _whole,
    "reduce_scatter": _whole,
    "reduce_scatter_tensor_coalesced": _whole,
    "_reduce_scatter_base": _whole,
    "alltoall": _lists,
    "alltoall_base": _splits,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    # Newer names of some of the above.
    "all_gather_single": _second,
    "reduce_scatter_single": _whole,
    "all_to_all_single": _splits,
}
MESSAGES = ("send", "recv")


def members(group: ProcessGroup) -> tuple[int, ...]:
    """The group's global ranks; a group outside torch's world counts its own."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return tuple(range(group.size()))


def call_site() -> str:
    """The innermost frames that are neither torch.distributed's nor ours, one a line."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith(OWN) and "contextlib" not in file:
            lines.append(f"{_short(file)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2] if "site-packages/" in file else file


def stacks() -> str:
    """The Python stacks of all threads of this process but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Wrap ProcessGroup's methods, for this process, until the end of the block."""
    recorder = Recorder()
    with contextlib.ExitStack() as undo:
        for name, describe in COLLECTIVES.items():
            if hasattr(ProcessGroup, name):
                undo.callback(setattr, ProcessGroup, name, getattr(ProcessGroup, name))
                setattr(ProcessGroup, name, _recorded(recorder, name, describe))
        for name in MESSAGES:
            undo.callback(setattr, ProcessGroup, name, getattr(ProcessGroup, name))
            setattr(ProcessGroup, name, _recorded_message(recorder, name))
        yield recorder


def watch(recorder: Recorder, owner: Any, name: str, describe: Callable[..., Entry]) -> None:
    """Record a collective that doesn't pass through ProcessGroup; `describe` gets the call's arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with recorder.outermost() as outer:
            if outer:
                recorder.enter(describe(*args, **kwargs))
            return original(*args, **kwargs)

    setattr(owner, name, watched)


def _recorded(recorder: Recorder, name: str, describe: Describe) -> Callable[..., Any]:
    original = getattr(ProcessGroup, name)

    @functools.wraps(original)
    def recorded(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        with recorder.outermost() as outer:
            if outer:
                facts = describe(*args, **kwargs)
                recorder.enter(Entry(name, group.group_name, members(group), site=call_site(), **facts))
            return original(group, *args, **kwargs)

    return recorded


def _recorded_message(recorder: Recorder, name: str) -> Callable[..., Any]:
    original = getattr(ProcessGroup, name)

    @functools.wraps(original)
    def recorded(group: ProcessGroup, tensors: Any, peer: int, tag: int, *args: Any, **kwargs: Any) -> Any:
        with recorder.outermost() as outer:
            if outer:
                ranks = members(group)
                entry = Entry(
                    name, group.group_name, ranks, **_share(_first(tensors)), agreed=(f"tag {tag}",),
                    peer=ranks[peer], site=call_site(),
                )  # fmt: skip
                recorder.enter(entry)
            return original(group, tensors, peer, tag, *args, **kwargs)

    return recorded
