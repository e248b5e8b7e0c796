"""The one row that a rank without requests runs, so that it enters the collectives that its peers enter.

Engines hand such a rank empty tensors, or leave some out. What is made of them has the device, the dtype and the other
dimensions of what was there. Whatever the row reads or writes by a request's field is a slot that no request owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelInputs:
    """What a decoder is called with; engines leave out what a step does not need.

    Attributes:
        input_ids: `[tokens]`.
        positions: `[tokens]`, or `[3, tokens]` for positions in time, height and width.
        input_embeds: `[tokens, hidden]`, in place of `input_ids`.
    """

    input_ids: Tensor | None = None
    positions: Tensor | None = None
    input_embeds: Tensor | None = None


@dataclass(frozen=True)
class Fallback:
    """What a model's inputs look like, for those that the engine left out.

    Attributes:
        device: where the model is.
        position_axes: 3 if positions are in time, height and width, else 1.
    """

    device: torch.device
    position_axes: int = 1


def dummy_inputs(inputs: ModelInputs, fallback: Fallback) -> ModelInputs:
    """One row of zeros for each input; the given ones are left alone.

    The row has embeddings if the engine gave any, even empty ones, else a token id.

    Raises:
        ValueError: the inputs have rows.
    """
    given = next((t for t in (inputs.positions, inputs.input_ids, inputs.input_embeds) if t is not None), None)
    device = fallback.device if given is None else given.device
    ids, positions, embeds = inputs.input_ids, inputs.positions, inputs.input_embeds
    if positions is None:
        shape = (fallback.position_axes, 0) if fallback.position_axes > 1 else (0,)
        positions = torch.empty(shape, dtype=torch.int64, device=device)
    if ids is None and embeds is None:
        ids = torch.empty(0, dtype=torch.int64, device=device)
    return replace(
        inputs,
        input_ids=None if ids is None else one_row(ids),
        positions=one_row(positions, dim=-1),
        input_embeds=None if embeds is None else one_row(embeds),
    )


def one_row(empty: Tensor, value: int = 0, dim: int = 0) -> Tensor:
    """A tensor like an empty one, but with one entry along `dim`, filled with a value.

    Raises:
        ValueError: the tensor has entries along `dim`.
    """
    if empty.shape[dim]:
        raise ValueError(f"a rank without tokens has a tensor {list(empty.shape)} with entries in dimension {dim}")
    shape = list(empty.shape)
    shape[dim] = 1
    return empty.new_full(shape, value)


@dataclass(frozen=True)
class ReservedSlots:
    """Places of an engine's pools that no request reads.

    Attributes:
        request: row of the table that says where a request's tokens are cached.
        cache: slot of the key-value cache.
        state: slot of the recurrent states; negative if such a slot stands for "none".
    """

    request: int
    cache: int
    state: int


@dataclass(frozen=True)
class RequestFields:
    """What an engine says about a step's requests; None: it does not say that.

    Attributes:
        request_rows: `[requests]` rows of the table of cached tokens.
        cache_slots: `[tokens]` where each token's keys and values go.
        seq_lens: `[requests]` tokens after this step.
        extend_lens: `[requests]` tokens in this step.
        prefix_lens: `[requests]` tokens before this step.
        state_slots: `[requests]` slots of the recurrent states.
        query_start_loc: `[requests + 1]` first row of each request.
    """

    request_rows: Tensor | None = None
    cache_slots: Tensor | None = None
    seq_lens: Tensor | None = None
    extend_lens: Tensor | None = None
    prefix_lens: Tensor | None = None
    state_slots: Tensor | None = None
    query_start_loc: Tensor | None = None


def dummy_fields(fields: RequestFields, reserved: ReservedSlots) -> RequestFields:
    """One request of one token, without a past, in reserved slots; what the engine does not say stays unsaid.

    Raises:
        ValueError: the fields say something about a request.
    """
    values: Mapping[str, int] = {
        "request_rows": reserved.request,
        "cache_slots": reserved.cache,
        "seq_lens": 1,
        "extend_lens": 1,
        "prefix_lens": 0,
        "state_slots": reserved.state,
    }
    given: dict[str, Tensor | None] = {name: getattr(fields, name) for name in values}
    made = {name: one_row(field, values[name]) for name, field in given.items() if field is not None}
    starts = fields.query_start_loc
    if starts is not None:
        made["query_start_loc"] = torch.arange(2, dtype=starts.dtype, device=starts.device)
    return replace(fields, **made)
