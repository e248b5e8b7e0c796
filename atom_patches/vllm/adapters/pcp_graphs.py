"""A split step and the engine's CUDA graphs: which graph runs a rank's rows, on which buffers, and how it is captured.

vLLM chooses a graph by the rows of the whole step, and a rank runs fewer. Where experts are spread over the ranks, a
split and a replicated step of equal size are different graphs besides: the exchange of rows is part of the graph.
Everything here follows from numbers that all ranks share, so all ranks replay the same graph, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context

from atom_patches.vllm.adapters.pcp_experts import experts_are_spread

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from atom_patches.vllm.adapters.pcp_step import SplitStep


@dataclass(frozen=True)
class SplitBatchDescriptor(BatchDescriptor):
    """The key of a graph in which rows meet the experts of all ranks. It never equals a key of the engine's own."""


_capturing_whole_rows: ContextVar[bool] = ContextVar("capturing_whole_rows", default=False)


@contextmanager
def capturing_whole_rows() -> Iterator[None]:
    """Passes within run as a replicated step: those before a capture have to run what is captured."""
    token = _capturing_whole_rows.set(True)
    try:
        yield
    finally:
        _capturing_whole_rows.reset(token)


def rows_are_whole() -> bool:
    """Whether every rank runs the same rows, so that experts need not see them once a rank.

    Profiling passes carry no metadata, and count as split: a gather is what takes more memory.
    """
    context = get_forward_context()
    if isinstance(context.batch_descriptor, SplitBatchDescriptor):
        return False
    real = context.attn_metadata is not None or context.cudagraph_runtime_mode != CUDAGraphMode.NONE
    return real or _capturing_whole_rows.get()


COPIES = "atom_pcp_copies"
"""Under which a forward context carries what :func:`current_copies` gives."""

_copies: WeakKeyDictionary[GPUModelRunner, torch.Tensor] = WeakKeyDictionary()
"""Of each runner, the buffer that its graphs read."""


def current_copies() -> torch.Tensor | None:
    """Whether each of a rank's first rows is on every rank, bool ``[requests]``; None in a pass of no split step."""
    return get_forward_context().additional_kwargs.get(COPIES)


def _copies_of(runner: GPUModelRunner) -> torch.Tensor:
    if runner not in _copies:
        with torch.inference_mode(False):  # it is written in passes of either kind
            _copies[runner] = torch.zeros(runner.max_num_reqs, dtype=torch.bool, device=runner.device)
    return _copies[runner]


@contextmanager
def rows_of_one_rank(runner: GPUModelRunner, rows: int, replicated: int) -> Iterator[int | None]:
    """Choose the forward pass's graph by the rows of one rank; gives the graph's rows, or None without a graph.

    Args:
        rows: of one rank.
        replicated: how many of them, from the first, are on every rank.
    """
    context = get_forward_context()
    outer = context.cudagraph_runtime_mode, context.batch_descriptor
    # A full graph holds attention, of a replicated step.
    mode, descriptor = runner.cudagraph_dispatcher.dispatch(rows, invalid_modes={CUDAGraphMode.FULL})
    if experts_are_spread(runner.vllm_config):
        descriptor = _split(descriptor)
        copies = context.additional_kwargs[COPIES] = _copies_of(runner)
        copies[:replicated] = True
        copies[replicated:] = False
    context.cudagraph_runtime_mode, context.batch_descriptor = mode, descriptor
    try:
        yield None if mode == CUDAGraphMode.NONE else descriptor.num_tokens
    finally:
        context.cudagraph_runtime_mode, context.batch_descriptor = outer
        context.additional_kwargs.pop(COPIES, None)


def own_inputs(
    runner: GPUModelRunner,
    step: SplitStep,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    graph_rows: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """This rank's rows of the model's inputs, in the runner's buffers.

    A graph reads the buffers that it was captured with, and compiled code takes them as they are laid out: M-RoPE's
    positions have the stride of the longest step.

    Args:
        input_ids: ``[num_tokens]``.
        positions: ``[num_tokens]``, or ``[3, num_tokens]`` for M-RoPE.
        inputs_embeds: ``[num_tokens, hidden]``.
        graph_rows: rows of the graph; None to run without.
    """
    own = step.take(input_ids), step.take(positions, dim=-1), step.take(inputs_embeds)
    count = step.plan.rows_per_rank if graph_rows is None else graph_rows
    # Nothing reads the whole step's rows there any more: the next step writes its own.
    buffers = runner.input_ids.gpu, _positions(runner), runner.inputs_embeds.gpu
    ids, places, embeds = (
        None if rows is None else _written(buffer, rows, count, dim)
        for buffer, rows, dim in zip(buffers, own, (0, -1, 0), strict=True)
    )
    return ids, places, embeds


@torch.inference_mode()
def capture_split_rows(runner: GPUModelRunner, descriptor: BatchDescriptor, warmups: int) -> None:
    """Capture the piecewise graphs of a split step beside those of a replicated one.

    Args:
        descriptor: of the replicated step's graphs.
        warmups: passes before.
    """
    rows = descriptor.num_tokens
    inputs, copies = _graph_inputs(runner, rows), _copies_of(runner)
    model: Any = runner.model  # a property of some runners, typed as optional
    for mode in [CUDAGraphMode.NONE] * warmups + [CUDAGraphMode.PIECEWISE]:
        with set_forward_context(
            None,
            runner.vllm_config,
            num_tokens=rows,
            cudagraph_runtime_mode=mode,
            batch_descriptor=_split(descriptor),
        ):
            get_forward_context().additional_kwargs[COPIES] = copies
            model(**inputs)


def _split(descriptor: BatchDescriptor) -> SplitBatchDescriptor:
    return SplitBatchDescriptor(**{field.name: getattr(descriptor, field.name) for field in fields(descriptor)})


def _positions(runner: GPUModelRunner) -> torch.Tensor:
    return runner.mrope_positions.gpu if runner.uses_mrope else runner.positions


def _written(buffer: torch.Tensor, rows: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """The first ``count`` rows of a buffer, of which the first are now ``rows``."""
    buffer.narrow(dim, 0, rows.shape[dim]).copy_(rows)
    return buffer.narrow(dim, 0, count)


def _graph_inputs(runner: GPUModelRunner, rows: int) -> dict[str, Any]:
    embedded = runner.supports_mm_inputs or runner.enable_prompt_embeds
    return {
        "input_ids": None if embedded else runner.input_ids.gpu[:rows],
        "positions": _positions(runner)[..., :rows],
        "intermediate_tensors": None,
        "inputs_embeds": runner.inputs_embeds.gpu[:rows] if embedded else None,
        **runner._init_model_kwargs(),
    }
