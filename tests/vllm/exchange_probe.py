"""Count the bytes that this rank really receives from the others of its prefill-context-parallel group."""

from __future__ import annotations

from typing import Any

import torch

received: dict[str, int] = {}


def install() -> None:
    """Wrap what moves rows and states; passes without a real step, such as a warm-up, are left out."""
    from vllm.distributed.parallel_state import GroupCoordinator

    def wrap(name: str, size: Any) -> None:
        original = getattr(GroupCoordinator, name)

        def counted(self: GroupCoordinator, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.unique_name.startswith("pcp") and _in_a_step():
                received[name] = received.get(name, 0) + size(self, args, kwargs, result)
            return result

        setattr(GroupCoordinator, name, counted)

    exchange = torch.distributed.all_to_all_single

    def counted_exchange(output: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _in_a_step():
            group = kwargs["group"]
            rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            rows = args[0] if args else [len(output) // ranks] * ranks
            of_others = (sum(rows) - rows[rank]) * (output[:1].numel() * output.element_size())
            received["all_to_all"] = received.get("all_to_all", 0) + of_others
        return exchange(output, sent, *args, **kwargs)

    torch.distributed.all_to_all_single = counted_exchange

    others = lambda self: self.world_size - 1  # noqa: E731
    wrap("all_gather", lambda self, args, kwargs, result: others(self) * _bytes(args[0]))
    wrap("reduce_scatter", lambda self, args, kwargs, result: others(self) * _bytes(result))
    wrap("all_reduce", lambda self, args, kwargs, result: 2 * others(self) * _bytes(result) // self.world_size)
    wrap("recv", lambda self, args, kwargs, result: _bytes(result))
    wrap("broadcast", lambda self, args, kwargs, result: _bytes(result) if kwargs["src"] != self.rank_in_group else 0)


def report() -> dict[str, int]:
    """Bytes by operation."""
    return dict(received)


def _in_a_step() -> bool:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and get_forward_context().attn_metadata is not None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
