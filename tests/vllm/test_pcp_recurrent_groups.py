"""Groups of recurrent layers share a split step's metadata, all but their state slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.fla.ops import index
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from atom_patches.runtime.pcp import plan_step
from atom_patches.vllm.adapters import pcp_step

CPU = torch.device("cpu")
BLOCK = 16
MOST_BLOCKS = 12


@pytest.fixture(scope="module", autouse=True)
def whole_quotients() -> Iterator[None]:
    """vLLM hides Triton where there is no GPU, and with it the one function of it that runs on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "triton", SimpleNamespace(cdiv=lambda one, other: -(-one // other)))
        yield


def builder_of(mode: str, graphs: bool) -> GDNAttentionMetadataBuilder:
    spec: Any = MambaSpec(block_size=BLOCK, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    compilation = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: graphs), max_cudagraph_capture_size=None
    )
    config: Any = SimpleNamespace(
        compilation_config=compilation, speculative_config=None, cache_config=SimpleNamespace(mamba_cache_mode=mode),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    return GDNAttentionMetadataBuilder(spec, ["layer"], config, CPU)


def _whole() -> Any:
    """Carried along, and not looked at."""
    return object()


def batch_of(lengths: list[int], earlier: list[int], ranks: int, rank: int, mode: str) -> Any:
    plan = plan_step(lengths, ranks, 1)
    if plan is None:
        return None
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode=mode))
    seq_lens = [old + new for old, new in zip(earlier, lengths, strict=True)]
    return pcp_step.StepBatch(config, CPU, plan, rank, seq_lens, [rows > 1 for rows in lengths])


def differences(one: GDNAttentionMetadata | None, other: GDNAttentionMetadata | None) -> list[str]:
    if one is None or other is None:
        return [] if one is other else ["one of them is None"]
    values = ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return [name for name, left, right in values if str(left) != str(right) or type(left) is not type(right)]


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6),
    ranks=st.integers(2, 4),
    mode=st.sampled_from(["none", "align"]),
    graphs=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=150)
def test_a_second_group_differs_in_its_slots(
    requests: list[tuple[int, int]], ranks: int, mode: str, graphs: bool, data: st.DataObject
) -> None:
    requests.sort(key=lambda one: one[0])  # as the runner sorts them: decodes first
    lengths, earlier = [one[0] for one in requests], [one[1] for one in requests]
    batch = batch_of(lengths, earlier, ranks, data.draw(st.integers(0, ranks - 1)), mode)
    if batch is None:
        return
    builder, whole = builder_of(mode, graphs), _whole()
    tables = torch.randperm(2 * len(lengths) * MOST_BLOCKS).int().view(2, len(lengths), MOST_BLOCKS)
    slots = torch.arange(sum(lengths))
    first = pcp_step._recurrent_metadata(builder, batch, tables[0], slots, whole)
    built = pcp_step._recurrent_metadata(builder, batch, tables[1], slots, whole)
    shared = pcp_step._recurrent_metadata(builder, batch, tables[1], slots, whole, first)
    for part in ("replicated", "pooled"):
        assert differences(getattr(built, part), getattr(shared, part)) == []
    assert torch.equal(built.slots, shared.slots)
    assert torch.equal(built.fresh, shared.fresh)
