"""Full attention's queries move to the ranks that answer them, and the answers back, where rows stay contiguous.

Keys and values do not move: every rank's cache has all of them before a query is answered. Rows of one-byte elements
(FP8 queries of an FP8 cache) move as bytes, since neither indexing nor every collective takes FP8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_patches.runtime.pcp_attention_split import QueryExchange
from atom_patches.vllm.adapters.pcp_copies import on_device

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class QueryMover:
    """The two all-to-alls of one rank in one step, the same for every full-attention layer.

    Attributes:
        exchange: which rows go where.
        sent: rows that leave this rank.
    """

    def __init__(self, exchange: QueryExchange, group: GroupCoordinator, device: torch.device) -> None:
        rank = group.rank_in_group
        self.exchange = exchange
        self._group = group.device_group
        self._replicated = len(exchange.plan.replicated)
        self._sends = exchange.sends(rank)
        self._receives = exchange.receives(rank)
        self._send_rows = on_device(self._replicated + exchange.send_rows(rank), device)
        self.sent = sum(self._sends) - self._sends[rank]

    def collect(self, query: torch.Tensor) -> torch.Tensor:
        """The queries that this rank answers: the replicated ones, then its zigzag slice in the pool's order.

        Args:
            query: ``[rows_per_rank, heads, head_size]``, this rank's contiguous rows.
        """
        rows = _movable(query)
        collected = rows.new_empty((self._replicated + sum(self._receives), *rows.shape[1:]))
        collected[: self._replicated] = rows[: self._replicated]
        torch.distributed.all_to_all_single(
            collected[self._replicated :],
            rows.index_select(0, self._send_rows),
            self._receives,
            self._sends,
            group=self._group,
        )
        return collected.view(query.dtype)

    def hand_back(self, answers: torch.Tensor, output: torch.Tensor) -> None:
        """Write the answers to this rank's contiguous rows; padded rows become zero.

        Args:
            answers: as :meth:`collect` orders the queries.
            output: ``[rows_per_rank, heads, head_size]``, of the answers' dtype.
        """
        answers, output = _movable(answers), _movable(output)
        returned = answers.new_empty((sum(self._sends), *answers.shape[1:]))
        torch.distributed.all_to_all_single(
            returned, answers[self._replicated :], self._sends, self._receives, group=self._group
        )
        output[: self._replicated] = answers[: self._replicated]
        output[self._send_rows] = returned
        output[self._replicated + sum(self._sends) :] = 0


def _movable(rows: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes where an element is one. A zero byte is zero in every FP8 format."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
