"""Which graph a rank's rows run in, and from which buffers; with vLLM's own dispatcher and forward context."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context  # noqa: E402
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: E402

from atom_patches.runtime.pcp import plan_step  # noqa: E402
from atom_patches.vllm.adapters import pcp_graphs  # noqa: E402
from atom_patches.vllm.adapters.pcp_graphs import SplitBatchDescriptor, own_inputs, rows_of_one_rank  # noqa: E402

SIZES = [1, 2, 4, 8, 16, 24, 32]


class Runner(SimpleNamespace):
    """The part of a model runner that is asked. Each is one by itself, as vLLM's are."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    max_num_reqs, device = 5, torch.device("cpu")


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    """As an engine on a GPU has it; the CPU platform turns graphs off while it is made."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE))
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(CompilationConfig._attention_ops)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = SIZES, SIZES[-1]
    return config


@pytest.fixture(scope="module")
def runner(config: VllmConfig) -> SimpleNamespace:
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    return Runner(cudagraph_dispatcher=dispatcher, vllm_config=config)


def spread(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(pcp_graphs, "experts_are_spread", lambda config: yes)


def test_a_split_steps_key_is_never_the_engines() -> None:
    plain, split = BatchDescriptor(8), SplitBatchDescriptor(8)
    assert plain != split and split != plain
    assert len({plain: 0, split: 1}) == 2 and split == SplitBatchDescriptor(8)
    assert [field.name for field in fields(plain)] == [field.name for field in fields(split)]


@pytest.mark.parametrize("step_rows", [30, 5000])
@pytest.mark.parametrize("rows", [3, 17, 32, 33])
@pytest.mark.parametrize("experts", [True, False])
def test_the_graph_is_chosen_by_one_ranks_rows(
    monkeypatch: pytest.MonkeyPatch, runner: Any, config: VllmConfig, experts: bool, rows: int, step_rows: int
) -> None:
    spread(monkeypatch, experts)
    outer = BatchDescriptor(32) if step_rows <= 32 else BatchDescriptor(step_rows)
    mode = CUDAGraphMode.PIECEWISE if step_rows <= 32 else CUDAGraphMode.NONE
    with set_forward_context({}, config, num_tokens=step_rows, cudagraph_runtime_mode=mode, batch_descriptor=outer):
        with rows_of_one_rank(runner, rows, 4):
            pass  # a step before
        with rows_of_one_rank(runner, rows, 2) as graph_rows:
            inner = get_forward_context()
            expected = next((size for size in SIZES if size >= rows), None)
            assert graph_rows == expected
            assert inner.batch_descriptor is not None
            assert inner.batch_descriptor.num_tokens == (expected or rows)
            assert isinstance(inner.batch_descriptor, SplitBatchDescriptor) == experts
            assert inner.cudagraph_runtime_mode == (CUDAGraphMode.PIECEWISE if expected else CUDAGraphMode.NONE)
            assert pcp_graphs.rows_are_whole() != experts
            copies = pcp_graphs.current_copies()
            assert (None if copies is None else copies.tolist()) == ([True] * 2 + [False] * 3 if experts else None)
        assert get_forward_context().batch_descriptor == outer
        assert get_forward_context().cudagraph_runtime_mode == mode and pcp_graphs.current_copies() is None


def test_a_step_of_single_rows_is_no_full_graph_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, runner: Any, config: VllmConfig
) -> None:
    spread(monkeypatch, True)
    full, found = runner.cudagraph_dispatcher.dispatch(8, uniform_decode=True)
    assert full == CUDAGraphMode.FULL
    with set_forward_context({}, config, num_tokens=8, cudagraph_runtime_mode=full, batch_descriptor=found):
        with rows_of_one_rank(runner, 8, 8):
            assert get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        assert pcp_graphs.rows_are_whole()


def test_graphs_that_hold_attention_run_no_split_step(monkeypatch: pytest.MonkeyPatch, config: VllmConfig) -> None:
    spread(monkeypatch, True)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL)
    assert dispatcher.dispatch(8)[0] == CUDAGraphMode.FULL
    runner: Any = Runner(cudagraph_dispatcher=dispatcher, vllm_config=config)
    with set_forward_context({}, config, num_tokens=16), rows_of_one_rank(runner, 8, 8) as graph_rows:
        assert graph_rows is None and get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("metadata", "mode", "descriptor", "whole"),
    [
        pytest.param({}, CUDAGraphMode.NONE, BatchDescriptor(8), True, id="a replicated step"),
        pytest.param({}, CUDAGraphMode.FULL, BatchDescriptor(8), True, id="captured decodes"),
        pytest.param(None, CUDAGraphMode.PIECEWISE, BatchDescriptor(8), True, id="a captured replicated prefill"),
        pytest.param(None, CUDAGraphMode.PIECEWISE, SplitBatchDescriptor(8), False, id="a captured split prefill"),
        pytest.param({}, CUDAGraphMode.NONE, SplitBatchDescriptor(8), False, id="a split step"),
        pytest.param(None, CUDAGraphMode.NONE, BatchDescriptor(8), False, id="profiling"),
    ],
)
def test_whether_experts_see_rows_once(
    config: VllmConfig, metadata: Any, mode: CUDAGraphMode, descriptor: BatchDescriptor, whole: bool
) -> None:
    with set_forward_context(metadata, config, num_tokens=8, cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
        assert pcp_graphs.rows_are_whole() == whole


class Taker:
    """The part of a split step that picks rows."""

    def __init__(self, plan: Any, rank: int) -> None:
        self.plan = plan
        self.rows = plan.local_rows(rank)

    def take(self, rows: Any, dim: int = 0) -> Any:
        return None if rows is None else rows.index_select(dim, self.rows)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    ranks=st.integers(2, 4),
    mrope=st.booleans(),
    embeds=st.booleans(),
    padding=st.none() | st.integers(0, 8),
)
def test_a_graphs_inputs_are_this_ranks_rows_in_the_runners_buffers(
    lengths: list[int], ranks: int, mrope: bool, embeds: bool, padding: int | None
) -> None:
    plan = plan_step(lengths, ranks, min_rows=1)
    if plan is None:
        return
    total, room = plan.num_tokens, plan.num_tokens + 64
    for rank in range(ranks):
        rows = plan.local_rows(rank)
        flat = torch.arange(room)
        positions = torch.stack([flat, flat + 1000, flat + 2000]) if mrope else flat.clone()
        runner: Any = SimpleNamespace(
            input_ids=SimpleNamespace(gpu=flat + 5), uses_mrope=mrope, positions=positions,
            mrope_positions=SimpleNamespace(gpu=positions), inputs_embeds=SimpleNamespace(gpu=flat[:, None] * 2.0),
        )  # fmt: skip
        given_ids = None if embeds else runner.input_ids.gpu[:total]
        given_embeds = runner.inputs_embeds.gpu[:total] if embeds else None
        wanted = (flat + 5)[rows], positions[..., rows].clone(), (flat[:, None] * 2.0)[rows]
        graph_rows = None if padding is None else plan.rows_per_rank + padding
        step: Any = Taker(plan, rank)
        ids, places, vectors = own_inputs(runner, step, given_ids, positions[..., :total], given_embeds, graph_rows)
        assert (ids is None) == embeds and (vectors is None) != embeds
        for found, expected, buffer, dim in (
            (ids, wanted[0], runner.input_ids.gpu, 0),
            (places, wanted[1], positions, -1),
            (vectors, wanted[2], runner.inputs_embeds.gpu, 0),
        ):
            if found is None:
                continue
            assert found.data_ptr() == buffer.data_ptr(), "a graph reads the buffers that it was captured with"
            assert found.shape[dim] == plan.rows_per_rank + (padding or 0)
            assert found.stride() == buffer.stride(), "compiled code keeps the strides that it was compiled with"
            assert torch.equal(found.narrow(dim, 0, len(rows)), expected)


@pytest.mark.parametrize("embeds", [False, True])
def test_a_prefill_size_is_captured_for_replicated_and_for_split_steps(
    monkeypatch: pytest.MonkeyPatch, config: VllmConfig, embeds: bool
) -> None:
    from atom_patches.vllm.pcp import capture_split

    seen: list[tuple[Any, ...]] = []
    whole: list[bool] = []
    buffers: list[Any] = []

    def model(**inputs: Any) -> None:
        context = get_forward_context()
        rows = [len(inputs[name]) for name in ("input_ids", "inputs_embeds") if inputs[name] is not None]
        whole.append(pcp_graphs.rows_are_whole())
        buffers.append(pcp_graphs.current_copies())
        seen.append((context.cudagraph_runtime_mode, context.batch_descriptor, rows, len(inputs["positions"])))

    buffer = torch.arange(64)
    runner: Any = Runner(
        model=model, vllm_config=config, parallel_config=SimpleNamespace(prefill_context_parallel_size=2),
        compilation_config=SimpleNamespace(cudagraph_num_of_warmups=1), input_ids=SimpleNamespace(gpu=buffer),
        inputs_embeds=SimpleNamespace(gpu=buffer), positions=buffer, uses_mrope=False, supports_mm_inputs=embeds,
        enable_prompt_embeds=False, _init_model_kwargs=dict,
    )  # fmt: skip
    before: list[Any] = []

    def replicated(*args: Any) -> None:
        before.append(args)
        with set_forward_context(None, config, num_tokens=24, batch_descriptor=BatchDescriptor(24)):
            assert pcp_graphs.rows_are_whole(), "a pass before a capture runs what is captured"

    capture = capture_split.capture_both(replicated)
    descriptor = BatchDescriptor(24)
    capture(runner, descriptor, CUDAGraphMode.FULL)
    assert not seen and len(before) == 1
    capture(runner, descriptor, CUDAGraphMode.PIECEWISE)
    split = SplitBatchDescriptor(24)
    assert len(before) == 2 and whole == [False, False]
    assert seen == [(CUDAGraphMode.NONE, split, [24], 24), (CUDAGraphMode.PIECEWISE, split, [24], 24)]

    runner.cudagraph_dispatcher = CudagraphDispatcher(config)
    spread(monkeypatch, True)
    with set_forward_context({}, config, num_tokens=48), pcp_graphs.rows_of_one_rank(runner, 24, 1):
        buffers.append(pcp_graphs.current_copies())
    assert len({buffer.data_ptr() for buffer in buffers}) == 1, "a graph reads the buffer that it was captured with"
