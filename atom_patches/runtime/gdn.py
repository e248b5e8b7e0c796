"""What GatedDeltaNet layers need to know of a step: which rows belong to which sequence, and where states lie.

A step's sequences stand in this order: those that decode, one row each; those whose drafted tokens are verified,
equally many rows each; those that are prefilled. Rows behind the last sequence are padding, which an engine may add to
make all ranks' batches alike. Nothing here is read from the device: how many there are of each is known on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerStates:
    """One layer's pools of recurrent states, which its kernels update in place.

    Attributes:
        conv: `[slots, channels, at least taps - 1]`, the convolution's last inputs, oldest first.
        temporal: `[slots, value heads, value size, key size]`, any strides.
        draft_conv: `[rows, drafted, channels, taps - 1]`, what `conv` would be after each drafted token; may be a view
            in which windows overlap. None if the engine does not verify drafts.
        draft_temporal: `[rows, drafted, value heads, value size, key size]`, the same for `temporal`.
    """

    conv: Tensor
    temporal: Tensor
    draft_conv: Tensor | None = None
    draft_temporal: Tensor | None = None


@dataclass(frozen=True)
class GdnBinding:
    """A step's recurrent metadata and states.

    Attributes:
        query_start_loc: int32 `[sequences + 1]`, first row of each sequence.
        slots: int32 `[sequences]`, its state; negative: padding, which reads and writes none.
        has_initial_state: bool `[sequences]`, whether it goes on from that state; only read of those prefilled.
        decodes: sequences that decode.
        verifies: sequences whose drafts are verified. Live states stay as they are; what they would be after each
            drafted token goes to the layer's `draft_…` states.
        prefills: sequences that are prefilled.
        draft_tokens: rows of each sequence that is verified.
        draft_rows: int `[verifies]`, each one's row of the `draft_…` states.
        layers: the states, by layer.
        null_slot: a slot that stands for "none" besides negative ones; None: every other one is real.
    """

    query_start_loc: Tensor
    slots: Tensor
    has_initial_state: Tensor
    layers: Mapping[int, LayerStates]
    decodes: int = 0
    verifies: int = 0
    prefills: int = 0
    draft_tokens: int = 0
    draft_rows: Tensor | None = None
    null_slot: int | None = None

    def __post_init__(self) -> None:
        count = self.sequences
        if min(self.decodes, self.verifies, self.prefills) < 0:
            raise ValueError(f"counts are not negative: {self.decodes=}, {self.verifies=}, {self.prefills=}")
        for name, expected in (("query_start_loc", count + 1), ("slots", count), ("has_initial_state", count)):
            shape = tuple(getattr(self, name).shape)
            if shape != (expected,):
                raise ValueError(f"{name} must be [{expected}] for {count} sequences, got {list(shape)}")
        if self.verifies and (self.draft_tokens < 1 or self.draft_rows is None):
            raise ValueError("sequences to verify need draft_tokens, at least 1, and draft_rows")

    @classmethod
    def idle(cls, layers: Mapping[int, LayerStates], device: torch.device) -> GdnBinding:
        """Of a rank without requests: all rows are padding, and no state is touched."""
        return cls(
            query_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
            slots=torch.empty(0, dtype=torch.int32, device=device),
            has_initial_state=torch.empty(0, dtype=torch.bool, device=device),
            layers=layers,
        )

    @property
    def sequences(self) -> int:
        """All of them."""
        return self.decodes + self.verifies + self.prefills

    @property
    def first_prefill(self) -> int:
        """The first sequence that is prefilled."""
        return self.decodes + self.verifies

    @property
    def rows_before_prefills(self) -> int:
        """Rows of the sequences that decode or are verified."""
        return self.decodes + self.verifies * self.draft_tokens

    @cached_property
    def prefill_start_loc(self) -> Tensor:
        """`query_start_loc` of the prefilled sequences alone, counted from their first row."""
        starts = self.query_start_loc[self.first_prefill :]
        return starts - self.rows_before_prefills if self.rows_before_prefills else starts

    def states(self, layer: int) -> LayerStates:
        """One layer's.

        Raises:
            LookupError: the layer has none.
        """
        try:
            return self.layers[layer]
        except KeyError:
            raise LookupError(f"layer {layer} has no recurrent states; {sorted(self.layers)} have") from None
