"""The manager deals out the rows of the engine's own batches, and puts them together again, on ranks in threads."""

from __future__ import annotations

import ast
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.core import source
from atom_patches.vllm.pcp_manager import _config

if not source.defined(_config.MANAGER).ok:
    pytest.skip("this vLLM has no manager of prefill context parallelism", allow_module_level=True)

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from atom_patches.vllm.adapters import pcp_manager, pcp_step
from tests.vllm.ranks_in_threads import Group, run_ranks

CPU = torch.device("cpu")
ONLY_GRAPHS = {"input_buffers"}
"""What the runner asks a manager for where graphs are captured or decodes are split, neither of which is served."""
NO_GRAPH: Any = SimpleNamespace(cg_mode=CUDAGraphMode.NONE)
HIDDEN = 3

requests = st.lists(st.tuples(st.one_of(st.just(1), st.integers(2, 40)), st.integers(0, 50)), min_size=1, max_size=6)


def batch_of(lens: list[int], computed: list[int]) -> Any:
    """The engine's dummy batch with these requests in it: every token id and position is another number."""
    rows = sum(lens)
    buffers = InputBuffers(max_num_reqs=len(lens), max_num_tokens=rows, device=CPU)
    batch: Any = InputBatch.make_dummy(len(lens), rows, buffers)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    batch.num_scheduled_tokens = np.array(lens, dtype=np.int32)
    batch.num_computed_tokens_np = np.array(computed, dtype=np.int32)
    batch.query_start_loc_np = starts
    batch.input_ids = torch.arange(rows, dtype=torch.int32) + 1000
    batch.positions = torch.cat([torch.arange(done, done + n) for n, done in zip(lens, computed, strict=True)])
    return batch


def config(hybrid: bool) -> Any:
    model = SimpleNamespace(
        is_hybrid=hybrid, dtype=torch.float32, get_num_attention_heads=lambda parallel: 4, get_head_size=lambda: 32
    )
    return SimpleNamespace(model_config=model, parallel_config=None)


@pytest.fixture(scope="module", autouse=True)
def _ranks_in_threads() -> Any:
    """Each thread is the rank whose group it named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOM_PCP_MIN_ROWS", "1")
        patch.setenv("ATOM_PCP_ATTENTION", "zigzag")  # of hybrids only the queries are cut so
        for module in (pcp_manager, pcp_step):
            patch.setattr(module, "get_pcp_group", lambda: GROUPS[threading.get_ident()])
        yield


GROUPS: dict[int, Group] = {}


def run_rank(group: Group, lens: list[int], computed: list[int], hybrid: bool) -> tuple[Any, Any, torch.Tensor]:
    GROUPS[threading.get_ident()] = group
    batch = batch_of(lens, computed)
    manager = pcp_manager.manager_for(config(hybrid))(device=CPU, block_tables=None)
    dispatched = manager.get_num_tokens_for_dispatch(batch.num_scheduled_tokens, batch.is_prefilling_np)
    own = manager.partition_batch(batch, NO_GRAPH)
    assert dispatched == own.num_tokens == own.num_tokens_after_padding == len(own.input_ids) == len(own.positions)
    assert own.num_reqs == batch.num_reqs and pcp_manager.whole_batch(own) is batch
    # What a row's hidden state is depends on the row alone.
    hidden = own.input_ids[:, None] + torch.arange(HIDDEN) / 10
    restored, _, sampled = manager.restore_for_sampling(hidden, None)
    assert sampled is batch
    return batch, own, restored


@given(requests, st.integers(2, 5), st.booleans())
def test_rows_are_dealt_out_and_put_together_again(found: list[tuple[int, int]], ranks: int, hybrid: bool) -> None:
    lens, computed = [rows for rows, _ in found], [done for _, done in found]
    results = run_ranks(ranks, lambda group: run_rank(group, lens, computed, hybrid))
    pool = sum(rows for rows in lens if rows > 1)
    split = pool >= ranks
    seen: list[int] = []
    for batch, own, restored in results:
        assert (own is not batch) == split
        assert torch.equal(restored, batch.input_ids[:, None] + torch.arange(HIDDEN) / 10)
        at = own.input_ids - 1000
        assert torch.equal(own.positions, batch.positions[at])
        seen += at.tolist()
    assert set(seen) == set(range(sum(lens))), "some row is run by nobody"
    if split:
        decodes = sum(rows == 1 for rows in lens)
        assert {len(own.input_ids) for _, own, _ in results} == {decodes + -(-pool // ranks)}


def test_a_graph_may_not_hold_a_split_step() -> None:
    graph: Any = SimpleNamespace(cg_mode=CUDAGraphMode.PIECEWISE)

    def work(group: Group) -> None:
        GROUPS[threading.get_ident()] = group
        manager = pcp_manager.manager_for(config(True))(device=CPU, block_tables=None)
        with pytest.raises(AssertionError, match="no graph"):
            manager.partition_batch(batch_of([40], [0]), graph)

    run_ranks(2, work)


class Tables:
    """Says what it was asked."""

    def gather_block_tables(self, requests: Any, num_reqs_padded: int) -> Any:
        return "tables", requests, num_reqs_padded

    def compute_slot_mappings(self, requests: Any, starts: Any, positions: Any, num_tokens_padded: int) -> Any:
        return "slots", requests, starts, positions, num_tokens_padded


def test_caches_are_addressed_as_without_a_split_and_may_come_after_the_manager() -> None:
    def work(group: Group) -> tuple[Any, Any]:
        GROUPS[threading.get_ident()] = group
        manager: Any = pcp_manager.manager_for(config(True))(device=CPU)
        batch = batch_of([1, 40], [7, 0])
        own = manager.partition_batch(batch, NO_GRAPH)
        with pytest.raises(AssertionError, match="before there are caches"):
            manager.prepare_attn(own)
        manager.set_block_tables(Tables())
        return batch, manager.prepare_attn(own)

    for batch, (rows, slots) in run_ranks(2, work):
        assert rows == ("tables", batch.idx_mapping, 2)
        assert slots[1] is batch.idx_mapping and slots[2] is batch.query_start_loc
        assert slots[3] is batch.positions and slots[4] == 41


def test_it_has_whatever_the_runner_asks_a_manager_for() -> None:
    tree = ast.parse(inspect.getsource(model_runner))
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.pcp_manager"
    }
    manager = pcp_manager.SplitManager
    inherited = {name for name in asked if name not in vars(manager)}
    assert "partition_batch" in asked
    # The property gives back the batch that this package's method has kept.
    assert inherited <= {"global_batch", *ONLY_GRAPHS}


@pytest.mark.parametrize("name", ["prepare_inputs_to_capture", "prepare_inputs_for_capture_or_profile"])
def test_a_step_without_requests_stays_in_the_runners_buffers(name: str) -> None:
    manager = pcp_manager.manager_for(config(True))(device=CPU)
    batch = batch_of([3, 4], [0, 0])
    assert getattr(manager, name)(batch) is batch
