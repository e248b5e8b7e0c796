"""What one step under prefill context parallelism ran and exchanged, in numbers that are added up over steps.

Computed from the step's lengths and the model's dimensions by the functions that plan the step, not measured: where
the scheduler runs there is no device. The scheduler does not know the batch's order, which decides where a cut falls
when several prompts share a step; so what depends on that is exact for one prompt. With several it may be off, and
where two modes cost nearly the same, the mode may be the other one.

Bytes are those that one rank receives from the other ranks of its group, on average over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_attention_split import AttentionShape, QueryExchange, choose_layout
from atom_patches.runtime.pcp_gdn_cost import GdnShape, choose, two_pass_bytes

PREFIX = "atom_pcp."
NONE = "none"
AUTO = "auto"


@dataclass(frozen=True)
class Dimensions:
    """A model's layers as one tensor-parallel rank has them.

    Attributes:
        hidden_row: bytes of one hidden row.
        attention: a full-attention layer.
        attention_layers: their number.
        key_value_row: bytes of the keys and values of one row, over all of them.
        gdn: a GatedDeltaNet layer, if the model has any.
        gdn_layers: their number.
        router_row: bytes of one row's router logits.
        expert_layers: layers of experts that are spread over the ranks, so that rows meet there.
    """

    hidden_row: int
    attention: AttentionShape
    attention_layers: int
    key_value_row: int
    gdn: GdnShape | None = None
    gdn_layers: int = 0
    router_row: int = 0
    expert_layers: int = 0


@dataclass(frozen=True)
class Modes:
    """How layers run, or are asked to run; `none` for a kind of layer that the model does not have."""

    attention: str = NONE
    gdn: str = NONE
    experts: str = NONE


@dataclass(frozen=True)
class StepFigures:
    """One step.

    Attributes:
        split: whether the step was split; else every rank ran all of it.
        modes: how its layers ran; `none` for those that a replicated step runs as ever.
        rows_per_rank: rows of each rank, padding included.
        pooled_rows: rows that one rank runs for all.
        replicated_rows: rows that every rank runs.
        padding_rows: padding of all ranks together.
        key_value_bytes, query_bytes, recurrent_bytes, hidden_bytes, expert_bytes: what a rank receives.
    """

    split: bool
    modes: Modes
    rows_per_rank: int
    pooled_rows: int = 0
    replicated_rows: int = 0
    padding_rows: int = 0
    key_value_bytes: int = 0
    query_bytes: int = 0
    recurrent_bytes: int = 0
    hidden_bytes: int = 0
    expert_bytes: int = 0

    def packed(self) -> dict[str, int]:
        """The figures as a flat map of whole numbers, which any serialisation carries."""
        numbers = {name: int(value) for name, value in vars(self).items() if isinstance(value, int)}
        labels = {f"{name}={value}": 1 for name, value in vars(self.modes).items()}
        return {PREFIX + name: value for name, value in (numbers | labels).items()}

    @classmethod
    def unpacked(cls, packed: Mapping[str, int]) -> StepFigures | None:
        """What :meth:`packed` gave, among whatever else the map holds; None if there is nothing of it."""
        own = {name.removeprefix(PREFIX): value for name, value in packed.items() if name.startswith(PREFIX)}
        if not own:
            return None
        modes = Modes(**dict(name.split("=", 1) for name in own if "=" in name))
        numbers = {name: value for name, value in own.items() if "=" not in name}
        return cls(split=bool(numbers.pop("split")), modes=modes, **numbers)


def step_figures(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    world_size: int,
    min_rows: int,
    dimensions: Dimensions,
    asked: Modes,
) -> StepFigures:
    """The figures of a step.

    Args:
        query_lens: rows of every request in the step, each at least 1.
        context_lens: by request, the tokens that earlier steps have computed.
        world_size: ranks in the prefill-context-parallel group, at least 2.
        min_rows: as for :func:`plan_step`.
        dimensions: of the model.
        asked: how its layers are to run; `auto` is decided here as the ranks decide it.
    """
    plan = plan_step(query_lens, world_size, min_rows)
    if plan is None:
        return _replicated(sum(query_lens), world_size, dimensions, asked)
    modes = _resolve(plan, context_lens, dimensions, asked)
    moves = modes.attention == "zigzag" and dimensions.gdn is not None
    if modes.attention == "zigzag" and not moves:
        plan = replace(plan, layout="zigzag")
    others = world_size - 1
    return StepFigures(
        split=True,
        modes=modes,
        rows_per_rank=plan.rows_per_rank,
        pooled_rows=plan.pool_size,
        replicated_rows=len(plan.replicated),
        padding_rows=plan.slice_size * world_size - plan.pool_size,
        key_value_bytes=others * plan.slice_size * dimensions.key_value_row,
        query_bytes=_query_bytes(plan, dimensions) if moves else 0,
        recurrent_bytes=_recurrent_bytes(plan, dimensions.gdn, modes.gdn) * dimensions.gdn_layers,
        hidden_bytes=others * _sent_rows(plan) * dimensions.hidden_row,
        # A row and its logits are gathered before the experts, and the sums scattered after them.
        expert_bytes=others
        * plan.rows_per_rank
        * (2 * dimensions.hidden_row + dimensions.router_row)
        * dimensions.expert_layers,
    )


def _replicated(rows: int, world_size: int, dimensions: Dimensions, asked: Modes) -> StepFigures:
    """Every rank runs everything.

    The first rank's router logits reach the others, and outputs of spread experts are all-reduced: reduced, scattered
    and gathered.
    """
    row = dimensions.router_row + 2 * dimensions.hidden_row
    received = (world_size - 1) * rows * row * dimensions.expert_layers // world_size
    return StepFigures(
        split=False,
        modes=Modes(experts=asked.experts),
        rows_per_rank=rows,
        replicated_rows=rows,
        expert_bytes=received,
    )


def _resolve(plan: PcpPlan, context_lens: Sequence[int], dimensions: Dimensions, asked: Modes) -> Modes:
    gdn = dimensions.gdn
    layout = choose_layout(asked.attention, plan, context_lens, dimensions.attention, exchanged=gdn is not None)
    if gdn is None:
        return replace(asked, attention=layout)
    return replace(asked, attention=layout, gdn=choose(plan, gdn) if asked.gdn == AUTO else asked.gdn)


def _query_bytes(plan: PcpPlan, dimensions: Dimensions) -> int:
    """Queries move to the ranks that answer them, and the answers back."""
    counts = QueryExchange(plan).counts
    moved = sum(rows for src, row in enumerate(counts) for dst, rows in enumerate(row) if src != dst)
    return 2 * moved * dimensions.attention.query_bytes * dimensions.attention_layers // plan.world_size


def _recurrent_bytes(plan: PcpPlan, gdn: GdnShape | None, mode: str) -> int:
    """Rows or states, whatever the mode exchanges, of one layer."""
    if gdn is None:
        return 0
    ranks, others = plan.world_size, plan.world_size - 1
    if mode == "redundant":
        return others * plan.slice_size * gdn.row_bytes
    final = others * len(plan.pooled) * gdn.slot_bytes
    if mode == "two_pass":
        return others * sum(two_pass_bytes(plan, gdn)) + final // ranks
    if mode == "relay":
        handed_on = sum(plan.receives_state(rank) for rank in range(ranks))
        return (handed_on * gdn.slot_bytes + final) // ranks
    rows = plan.slice_size * (gdn.row_bytes + gdn.output_bytes)
    return others * (rows + len(plan.pooled) * gdn.slot_bytes) // ranks


def _sent_rows(plan: PcpPlan) -> int:
    """Rows that each rank sends so that all ranks have the rows from which logits are computed."""
    return len(plan.exchange([end - 1 for end in plan.query_start_loc[1:]]).send_rows[0])
