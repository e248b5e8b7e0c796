"""How the keys of a step's prefills are cut into pieces, so that those made of latents at one time are few.

A piece has keys of requests that follow each other, each from a page of its own on, and the rows that ask it follow
each other too: attention over a piece is one call. Causal pieces come first and cover every row once, with its own
chunk's keys; the others have what rows see whole: the tokens before their chunk, and, of a chunk that is longer than a
piece, those before their own part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PAGE = 16
"""Tokens; a multiple of it suits FlashAttention, and AITER has this one."""


@dataclass(frozen=True)
class Piece:
    """Keys that are made together.

    Attributes:
        rows: those that ask, among the prefills' rows.
        slots: of each key in the cache, in whole pages; -1: padding.
        starts: of each request's rows among `rows`, and their end.
        lengths: keys of each request.
        table: pages of each request among those of the piece; entries behind its last name others or none.
        most_rows, most_keys: of one request.
        causal: whether each request's rows and keys are the same tokens.
    """

    rows: slice
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor
    most_rows: int
    most_keys: int
    causal: bool


class Portion(NamedTuple):
    """Keys of one request, by position, and the rows that ask them."""

    request: int
    first: int
    last: int
    start: int
    stop: int

    @property
    def pages(self) -> int:
        """That hold the keys."""
        return -(-(self.last - self.first) // PAGE)


def pieces_of(starts: list[int], lengths: list[int], blocks: Tensor, size: int, room: int) -> list[Piece]:
    """The pieces of requests with rows from `starts`, whose end is last, and `lengths` tokens cached.

    Args:
        blocks: of each request's tokens, `[requests, any]`, where the pieces will be.
        size: tokens of a block.
        room: tokens of a piece, at most; whole pages.
    """
    causal = packed(_own(starts, lengths, room), room)
    whole = packed(_before(starts, lengths, room), room)
    plans = [*((portions, True) for portions in causal), *((portions, False) for portions in whole)]
    device = blocks.device
    moved = _moved([numbers for portions, _ in plans for numbers in _numbers(portions)], device)
    pieces: list[Piece] = []
    for index, (portions, is_causal) in enumerate(plans):
        request, position, starts_, lengths_, table = moved[5 * index : 5 * index + 5]
        slots = blocks[request, position // size] * size + position % size
        pieces.append(
            Piece(
                rows=slice(portions[0].start, portions[-1].stop),
                slots=torch.where(position < 0, -1, slots),
                starts=starts_,
                lengths=lengths_,
                table=table,
                most_rows=max(one.stop - one.start for one in portions),
                most_keys=max(one.last - one.first for one in portions),
                causal=is_causal,
            )
        )
    return pieces


def packed(portions: Iterator[Portion], room: int) -> list[list[Portion]]:
    """As many together as fit, in order; none where there are no keys but between others.

    Their rows follow each other: only the last portion of a request is shorter than a piece, and ends with its rows.
    """
    pieces: list[list[Portion]] = []
    free = 0
    for portion in portions:
        if pieces and portion.pages <= free:
            pieces[-1].append(portion)
        elif portion.pages:
            pieces.append([portion])
            free = room // PAGE
        else:
            continue
        free -= portion.pages
    for piece in pieces:
        while not piece[-1].pages:
            piece.pop()
    return pieces


def _own(starts: list[int], lengths: list[int], room: int) -> Iterator[Portion]:
    """What rows see of their own part of a chunk."""
    for request, (start, have, new) in enumerate(_requests(starts, lengths)):
        for first in range(0, new, room):
            last = min(first + room, new)
            yield Portion(request, have + first, have + last, start + first, start + last)


def _before(starts: list[int], lengths: list[int], room: int) -> Iterator[Portion]:
    """What rows see whole; of a request with nothing cached, that it is nothing, so that others' rows connect."""
    for request, (start, have, new) in enumerate(_requests(starts, lengths)):
        for first in range(0, max(have, 1), room):
            yield Portion(request, first, min(first + room, have), start, start + new)
        for last in range(room, new, room):
            yield Portion(request, have + last - room, have + last, start + last, start + new)


def _requests(starts: list[int], lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Of each its first row, tokens cached before the step, and new ones."""
    for start, stop, length in zip(starts, starts[1:], lengths, strict=False):
        yield start, length - (stop - start), stop - start


def _numbers(portions: list[Portion]) -> list[Tensor]:
    """Of a piece: each key's request and position, where rows start, numbers of keys, and tables of pages."""
    request, first, last, start, stop = torch.tensor(portions, dtype=torch.int32).unbind(1)
    counts = last - first
    pages = (counts + PAGE - 1) // PAGE
    begins = pages.cumsum(0) - pages
    owner = torch.repeat_interleave(torch.arange(len(portions)), pages * PAGE)
    place = torch.arange(len(owner)) - begins[owner] * PAGE
    position = torch.where(place < counts[owner], first[owner] + place, -1)
    starts = torch.cat([start, stop[-1:]]) - start[0]
    table = begins[:, None] + torch.arange(int(pages.max()))
    return [request[owner], position, starts, counts, table]


def _moved(numbers: list[Tensor], device: torch.device) -> list[Tensor]:
    """All as int32 in one copy that the host does not wait for."""
    flat = torch.cat([one.flatten().int() for one in numbers])
    if device.type == "cuda":
        flat = flat.pin_memory()
    moved = flat.to(device, non_blocking=True)
    parts: tuple[Tensor, ...] = torch.split(moved, [one.numel() for one in numbers])
    return [part.view(one.shape) for part, one in zip(parts, numbers, strict=True)]
