"""Full attention in a split step: keys and values are made whole before they are written to the paged cache.

Each rank writes the keys and values of the whole step, with the whole step's slots, and then reads the cache with the
query start locations and lengths of the queries that it answers: those of its own rows, unless the step moves queries
to balance the ranks. So earlier prefill chunks, prefix-cache hits and decodes need nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from atom_patches.core import settings
from atom_patches.runtime.pcp_gdn_cost import AUTOMATIC
from atom_patches.runtime.pcp_gdn_memory import held_bytes
from atom_patches.vllm.adapters.pcp_shapes import gdn_shape
from atom_patches.vllm.adapters.pcp_step import SplitStep, current_split_step, logger

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def gather_key_value(
    step: SplitStep, layer: Any, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole step from this rank's rows, in one all-gather.

    Args:
        layer: the attention layer.
        key: ``[rows_per_rank, kv_heads, head_size]``.
        value: ``[rows_per_rank, kv_heads, value_head_size]``.

    Returns:
        The same with ``num_tokens`` rows in global order.
    """
    sizes = [key.shape[-1], value.shape[-1]]
    whole_key, whole_value = step.gather(torch.cat([key, value], dim=-1)).split(sizes, dim=-1)
    if settings.pcp_debug():
        logger.info("%s: rank %d gathers %d keys and values", layer.layer_name, step.rank, whole_key.shape[0])
    return whole_key.contiguous(), whole_value.contiguous()


def gather_before_write(write: Callable[..., None]) -> Callable[..., None]:
    """Wrap a backend's ``do_kv_cache_update`` so that it writes the whole step.

    For backends that write the cache apart from ``forward`` (FlashAttention, Triton). The engine passes the
    whole step's slot mapping already.
    """

    def do_kv_cache_update(
        self: Any,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        step = current_split_step()
        if step is not None:
            key, value = gather_key_value(step, layer, key, value)
            # The slots of a replicated step would end with a graph's padding, and no keys go there.
            slot_mapping = slot_mapping[: len(key)]
        write(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update


def answer_moved_queries(
    forward: Callable[..., torch.Tensor], *, writes_cache: bool = False
) -> Callable[..., torch.Tensor]:
    """Wrap a backend's ``forward`` so that it answers the queries that the step gives to this rank.

    The step's metadata describes those queries. Where ``forward`` writes keys and values to the cache itself, it gets
    the whole step's.
    """

    def answer(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        step = current_split_step()
        if step is not None and writes_cache:
            key, value = gather_key_value(step, layer, key, value)
        if step is None or step.queries is None:
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        collected = step.queries.collect(query)
        answers = output.new_empty((len(collected), *output.shape[1:]))
        forward(self, layer, collected, key, value, kv_cache, attn_metadata, answers, *args, **kwargs)
        del collected
        step.queries.hand_back(answers, output)
        if settings.pcp_debug():
            logger.info("%s: rank %d sends %d queries away", layer.layer_name, step.rank, step.queries.sent)
        return output

    return answer


def largest_exchange(runner: GPUModelRunner, tokens: int, rows: int) -> int:
    """Elements that a split step holds at once, at most, to gather hidden states, to run full attention, or to run a
    recurrent layer.

    Args:
        tokens: rows of the whole step.
        rows: rows of one rank.
    """
    model, parallel = runner.model_config, runner.parallel_config
    head = model.get_head_size()
    hidden = 2 * tokens * model.get_hidden_size()
    # The gathered slices, all rows in order, and keys and values apart.
    keys_values = 3 * tokens * 2 * model.get_num_kv_heads(parallel) * head
    moves = model.is_hybrid and settings.pcp_attention() != "contiguous"
    # What is sent and what is received, of queries and then of answers.
    queries = 2 * rows * model.get_num_attention_heads(parallel) * head if moves else 0
    recurrent = 0
    if model.is_hybrid:
        ranks, shape = parallel.prefill_context_parallel_size, gdn_shape(runner.vllm_config)
        asked = settings.pcp_gdn()
        modes: tuple[str, ...] = AUTOMATIC if asked == "auto" else (asked,)
        held = (held_bytes(mode, ranks, tokens, rows, runner.max_num_reqs, shape) for mode in modes)
        recurrent = max(held) // shape.element_bytes
    return max(hidden, keys_values, queries, recurrent)


def writes_gathered(impl: Any) -> bool:
    """Whether an attention implementation's methods are those that this module wrapped.

    Most backends have a ``do_kv_cache_update``; one that is not wrapped would write this rank's rows to others' slots,
    and one whose ``forward`` is not would answer queries that its metadata does not describe.
    """
    methods = [getattr(type(impl), name, None) for name in ("do_kv_cache_update", "forward")]
    return all(getattr(method, "__globals__", None) is globals() for method in methods)
