"""What the prefill of one long prompt takes on N ranks: each rank's work from measured parts, collectives from a link.

The step is played through, layer by layer, on one clock a rank. A part of the work moves a rank's clock by the seconds
that were measured for it; a collective lets all ranks meet and then takes ``latency + bytes / bandwidth``; a relay lets
each rank wait for the one before it, while the ranks before go on until all meet again. Nothing else overlaps. What the
host issues for a split, one operation after the other, is added, and a split step's time on the devices counts a little
more than the sum of its parts (`runtime/pcp_host.py`); the host's other time, which one rank has too, is left out.

A collective's bytes are the most that one rank sends, or receives, if every rank has to do with every byte once: the
``(N - 1) / N`` of the whole that a ring passes through each link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from atom_patches.runtime import pcp_host
from atom_patches.runtime.link import Link
from atom_patches.runtime.pcp import PcpPlan
from atom_patches.runtime.pcp_attention_split import QueryExchange
from atom_patches.runtime.pcp_cuts import Layout, cut_pool
from atom_patches.runtime.pcp_gdn_cost import GdnShape, admissible, two_pass_bytes

ROW_LIMIT = 65536
"""A part with more rows is measured with so many, and counted in proportion: its work grows with its rows."""


@dataclass(frozen=True)
class StackShape:
    """A stack of layers: after every ``recurrent_per_attention`` GatedDeltaNet layers one of full attention, each with
    experts behind it. Attributes name sizes and counts; ``page`` is the cache's block size."""

    name: str
    hidden: int
    attention_layers: int
    recurrent_per_attention: int
    key_heads: int
    value_heads: int
    head_size: int
    taps: int
    q_heads: int
    kv_heads: int
    attention_size: int
    rotary: int
    experts: int
    expert_width: int
    top_k: int
    vocabulary: int
    page: int
    element_bytes: int

    @property
    def recurrent_layers(self) -> int:
        return self.attention_layers * self.recurrent_per_attention

    @property
    def gdn(self) -> GdnShape:
        """A GatedDeltaNet layer."""
        return GdnShape(self.key_heads, self.value_heads, self.head_size, self.head_size, self.taps, self.element_bytes)


SHAPES = {
    shape.name: shape
    for shape in (
        StackShape(
            "qwen3.6-35b-a3b", hidden=2048, attention_layers=10, recurrent_per_attention=3, key_heads=16,
            value_heads=32, head_size=128, taps=4, q_heads=16, kv_heads=2, attention_size=256, rotary=64, experts=256,
            expert_width=512, top_k=8, vocabulary=151936, page=784, element_bytes=2,
        ),
        StackShape(
            "tiny", hidden=64, attention_layers=2, recurrent_per_attention=3, key_heads=2, value_heads=4, head_size=16,
            taps=4, q_heads=4, kv_heads=2, attention_size=16, rotary=8, experts=8, expert_width=16, top_k=2,
            vocabulary=128, page=16, element_bytes=4,
        ),
    )
}  # fmt: skip


class Part(NamedTuple):
    """Work between two exchanges, as one rank does it.

    Attributes:
        kind: which work; ``bench.pcp_parts`` has one builder a kind.
        kernels: whose: ``engine`` or ``auto``.
        rows: rows that go in; none where they do not matter.
        world: ranks, where the work depends on them; else 1.
        pieces: of attention, (queries, keys) of each run of rows.
    """

    kind: str
    kernels: str
    rows: int
    world: int = 1
    pieces: tuple[tuple[int, int], ...] = ()

    def measured(self) -> tuple[Part, float]:
        """The part that is measured for this one, and how many times its seconds count."""
        if self.pieces or self.rows <= ROW_LIMIT:
            return self, 1.0
        return self._replace(rows=ROW_LIMIT), self.rows / ROW_LIMIT


class Variant(NamedTuple):
    """One way to run a split prefill.

    Attributes:
        attention: how the queries of full attention are cut.
        recurrent: how GatedDeltaNet layers run.
        experts: ``replicate``: every rank has all experts, for its own rows; ``ep``: a share of them, for all rows.
        kernels: ``engine``; ``auto``; or ``overlay``: this package's scans in an engine that is else as it is, which is
            what a patched engine runs.
    """

    attention: Layout
    recurrent: str
    experts: str
    kernels: str

    def kernels_of(self, kind: str) -> str:
        """Whose kernels a kind of part runs: some kinds have no others."""
        if kind in OWN or (kind in SCANS and self.kernels == "overlay"):
            return "auto"
        return "engine" if self.kernels == "overlay" else self.kernels


LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")
RECURRENT = ("redundant", "relay", "two_pass", "head_all_to_all")
EXPERTS = ("replicate", "ep")
SCANS = ("recurrent_scan",)
OWN = ("recurrent_segment", "recurrent_enter", "recurrent_heads", "deal_out_heads", "collect_heads")


def variants(kernels: str, only: frozenset[str] = frozenset()) -> list[Variant]:
    """The ways to run a split prefill with these kernels; of each kind those in `only`, or all if it has none."""
    ways = [[way for way in kind if way in only] or kind for kind in (LAYOUTS, RECURRENT, EXPERTS)]
    return [Variant(*choice, kernels) for choice in product(*ways)]  # type: ignore[arg-type]


def runs(shape: StackShape, world: int, variant: Variant) -> bool:
    """Whether the shape can be run so on so many ranks."""
    return variant.recurrent != "head_all_to_all" or admissible("head_all_to_all", world, shape.gdn)


@dataclass
class Exchanged:
    """What the exchanges of one kind cost in a step.

    Attributes:
        count: exchanges.
        bytes: of one rank.
        seconds: of all of them.
        all_meet: whether every rank takes part in each, and so spends those seconds; else some only wait for others.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    all_meet: bool = True


class Unmeasured(LookupError):
    """A part has no time; the message says which, and why."""


Seconds = Callable[[Part], float]


class Clocks:
    """The ranks' clocks in one step.

    Args:
        seconds: what a part takes.
        launch: what an operation that the host issues for the split adds.
    """

    def __init__(self, world: int, link: Link, seconds: Seconds, launch: float = pcp_host.SECONDS) -> None:
        self.at = [0.0] * world
        self.busy = [0.0] * world
        self.host = 0.0
        self.exchanged: dict[str, Exchanged] = {}
        self._link = link
        self._seconds = seconds
        self._launch = launch

    def work(self, *parts: Part) -> None:
        """Every rank does the same."""
        for part in parts:
            self.work_each([part] * len(self.at))

    def work_each(self, parts: list[Part]) -> None:
        """Each rank does its own part."""
        for rank, part in enumerate(parts):
            self._spend(rank, part)

    def launch(self, count: int) -> None:
        """Every rank's host issues so many operations for the split."""
        seconds = count * self._launch
        self.at = [at + seconds for at in self.at]
        self.host += seconds

    def exchange(self, kind: str, bytes: int) -> None:
        """All ranks meet, and a collective begins."""
        self.at = [max(self.at) + self._charge(kind, bytes, bytes)] * len(self.at)

    def relay(self, part: Part, kind: str, bytes: int) -> None:
        """Each rank needs what the rank before it has after the same part; a rank that has sent goes on."""
        for rank in range(len(self.at)):
            if rank:
                # One rank sends once; the hops follow one another.
                hop = self._charge(kind, bytes, bytes if rank == 1 else 0, all_meet=False)
                self.at[rank] = max(self.at[rank], self.at[rank - 1] + hop)
            self._spend(rank, part)

    def _spend(self, rank: int, part: Part) -> None:
        seconds = self._seconds(part)
        self.at[rank] += seconds
        self.busy[rank] += seconds

    def _charge(self, kind: str, bytes: int, own: int, all_meet: bool = True) -> float:
        """Note an exchange of ``bytes``, of which one rank has to do with ``own``."""
        seconds = self._link.seconds(bytes)
        total = self.exchanged.setdefault(kind, Exchanged(all_meet=all_meet))
        total.count += 1
        total.bytes += own
        total.seconds += seconds
        return seconds


@dataclass(frozen=True)
class Estimate:
    """What came out for one variant.

    Attributes:
        seconds: until the first token's logits.
        slowest: what the busiest rank works.
        exchanged: by kind of collective.
        host: what the hosts' launches for the split add.
    """

    seconds: float
    slowest: float
    exchanged: Mapping[str, Exchanged]
    host: float = 0.0

    @property
    def exchange(self) -> float:
        """What the exchanges take in which all ranks meet."""
        return sum(one.seconds for one in self.exchanged.values() if one.all_meet)

    @property
    def waiting(self) -> float:
        """What is neither the busiest rank's work, nor such an exchange, nor the host: waiting for ranks or states, and
        what a split step takes beyond its parts."""
        return max(0.0, self.seconds - self.slowest - self.exchange - self.host)

    def bound(self, alone: float, world: int) -> float:
        """No split is faster, unless more rows take more than their share: an equal share of what one rank takes
        ``alone``, and the exchanges in which all meet."""
        return alone / world + self.exchange


def estimate(
    shape: StackShape,
    length: int,
    world: int,
    variant: Variant,
    link: Link,
    seconds: Seconds,
    launch: float = pcp_host.SECONDS,
    surplus: float = pcp_host.SPLIT,
) -> Estimate:
    """Play one prefill of ``length`` tokens through; ``world`` 1 is an engine without context parallelism.

    A split step takes ``surplus`` times what is played.

    Raises:
        Unmeasured: from ``seconds``.
    """
    clocks = Clocks(world, link, seconds, launch)
    step = _Step(shape, length, world, variant, clocks)
    for _ in range(shape.attention_layers):
        for _ in range(shape.recurrent_per_attention):
            step.recurrent()
            step.experts()
        step.attention()
        step.experts()
    step.ends()
    devices = (max(clocks.at) - clocks.host) * (1.0 if world == 1 else surplus)
    return Estimate(devices + clocks.host, max(clocks.busy), clocks.exchanged, clocks.host)


def parts(shape: StackShape, length: int, world: int, variant: Variant) -> Iterator[Part]:
    """The parts whose seconds :func:`estimate` will ask for, in their order; layers that are alike ask for the same."""
    found: list[Part] = []

    def note(part: Part) -> float:
        found.append(part)
        return 0.0

    once = replace(shape, attention_layers=1, recurrent_per_attention=1)
    estimate(once, length, world, variant, Link(1.0, 0.0), note)
    yield from found


class _Step:
    """The layers of one step, as all ranks run them."""

    def __init__(self, shape: StackShape, length: int, world: int, variant: Variant, clocks: Clocks) -> None:
        self._shape = shape
        self._length = length
        self._world = world
        self._variant = variant
        self._clocks = clocks
        self._plan = PcpPlan(world, (length,))
        self._rows = self._plan.slice_size
        self._moved = QueryExchange(self._plan).moved_rows if world > 1 else 0
        self._queries = [self._attention_part(rank) for rank in range(world)]

    def recurrent(self) -> None:
        self._clocks.work(self._part("recurrent_in"))
        ways = {
            "redundant": self._redundant,
            "relay": self._relay,
            "two_pass": self._two_pass,
            "head_all_to_all": self._heads,
        }
        if self._world > 1:
            self._clocks.launch(pcp_host.recurrent_launches(self._variant.recurrent, self._plan))
        (ways[self._variant.recurrent] if self._world > 1 else self._alone)()
        self._clocks.work(self._part("recurrent_out"))

    def attention(self) -> None:
        shape, clocks = self._shape, self._clocks
        if self._world == 1:
            clocks.work(self._part("attention_in_cached"), *self._queries, self._part("attention_out"))
            return
        zigzag = self._variant.attention == "zigzag"
        clocks.work(self._part("attention_in"))
        clocks.launch(pcp_host.KEYS_AND_VALUES + (pcp_host.QUERIES if zigzag else 0))
        row = 2 * shape.kv_heads * shape.attention_size * shape.element_bytes
        clocks.exchange("keys and values", self._ring(self._length * row))
        clocks.work(self._part("write_keys", self._length))
        moved = self._moved * shape.q_heads * shape.attention_size * shape.element_bytes
        if zigzag:
            clocks.work(self._part("move_queries"))
            clocks.exchange("queries", moved)
        clocks.work_each(self._queries)
        if zigzag:
            clocks.exchange("answers", moved)
            clocks.work(self._part("move_queries"))
        clocks.work(self._part("attention_out"))

    def experts(self) -> None:
        shape, clocks = self._shape, self._clocks
        if self._world == 1 or self._variant.experts == "replicate":
            clocks.work(self._part("experts"))
            return
        clocks.work(self._part("experts_in"))
        clocks.launch(pcp_host.EXPERTS)
        row = shape.hidden * shape.element_bytes
        logits = shape.experts * shape.element_bytes
        clocks.exchange("experts' rows", self._ring(self._length * (row + logits)))
        clocks.work(self._part("experts_share", self._length, self._world))
        clocks.exchange("experts' sums", self._ring(self._length * row))

    def ends(self) -> None:
        """Embedding, last norm and the logits of the last row; the last rank's states for all that lack them."""
        if self._world > 1 and self._variant.recurrent in ("relay", "two_pass"):
            self._clocks.exchange("final states", self._shape.recurrent_layers * self._shape.gdn.slot_bytes)
        if self._world > 1:
            row = self._shape.hidden * self._shape.element_bytes
            self._clocks.exchange("last row", self._ring(self._world * row))
        self._clocks.work(self._part("ends"))

    def _alone(self) -> None:
        self._clocks.work(self._part("recurrent_scan"))

    def _redundant(self) -> None:
        """Every rank has all rows, and scans them."""
        self._clocks.exchange("recurrent rows", self._ring(self._length * self._shape.gdn.row_bytes))
        self._clocks.work(*(self._part(kind, self._length) for kind in ("restore_recurrent", "recurrent_scan")))

    def _relay(self) -> None:
        """A rank scans after the rank before it. Nobody needs the final state before the step's end."""
        self._clocks.relay(self._part("recurrent_scan"), "states", self._shape.gdn.slot_bytes)

    def _two_pass(self) -> None:
        """All ranks at once: what their rows do to any state, then, from the composed states, the rows themselves.

        The last rank composes most, of all ranks' states but the first one's and its own.
        """
        halos, states = ((self._world - 1) * sent for sent in two_pass_bytes(self._plan, self._shape.gdn))
        self._clocks.exchange("halos", halos)
        self._clocks.work(self._part("recurrent_segment"))
        self._clocks.exchange("states", states)
        if self._world > 2:
            self._clocks.work(self._part("recurrent_enter", 0, self._world))
        self._clocks.work(self._part("recurrent_scan"))

    def _heads(self) -> None:
        """Every rank has all rows of its share of the heads, and scans them."""
        gdn, clocks = self._shape.gdn, self._clocks
        assert runs(self._shape, self._world, self._variant), "ask `runs` first"
        clocks.work(self._part("deal_out_heads", world=self._world))
        clocks.exchange("rows by heads", self._ring(self._rows * gdn.row_bytes))
        clocks.work(self._part("recurrent_heads", self._length, self._world))
        clocks.exchange("outputs by heads", self._ring(self._rows * gdn.output_bytes))
        clocks.work(self._part("collect_heads", world=self._world))
        clocks.exchange("final states by heads", self._ring(gdn.slot_bytes))

    def _part(self, kind: str, rows: int | None = None, world: int = 1) -> Part:
        return Part(kind, self._variant.kernels_of(kind), self._rows if rows is None else rows, world)

    def _attention_part(self, rank: int) -> Part:
        """Attention is the engine's in every variant."""
        layout = self._variant.attention if self._world > 1 else "contiguous"
        pieces = cut_pool(self._length, self._world, layout).pieces[rank]
        runs = tuple((end - start, end) for start, end in pieces)
        return Part("attention", "engine", sum(rows for rows, _ in runs), 1, runs)

    def _ring(self, bytes: int) -> int:
        return bytes * (self._world - 1) // self._world
