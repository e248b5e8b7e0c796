"""On a GPU, planning and running a split step never makes the host wait for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import Tensor  # noqa: E402

from atom_patches.runtime.pcp import PcpPlan, plan_step  # noqa: E402
from atom_patches.runtime.pcp_attention_split import QueryExchange  # noqa: E402
from atom_patches.runtime.pcp_gdn import HaloExchange  # noqa: E402
from atom_patches.vllm.adapters import pcp_step  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn import MODES, relay, two_pass  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn.core_layer import engine_layer  # noqa: E402
from atom_patches.vllm.adapters.pcp_queries import QueryMover  # noqa: E402
from atom_patches.vllm.adapters.pcp_step import RecurrentMetadata, SplitStep  # noqa: E402
from tests.host_waits import GPU, host_waits  # noqa: E402

RANKS = 2
KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 2, 4, 4, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE


class Alone:
    """A group whose other ranks bring what this one brings."""

    world_size, device_group, device_communicator = RANKS, None, None

    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank

    def all_gather(self, rows: Tensor, dim: int) -> Tensor:
        return torch.cat([rows] * RANKS, dim=dim)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, dst: int) -> None:
        pass

    def recv(self, size: Any, dtype: Any, src: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=GPU)


def plan_of(lengths: list[int]) -> PcpPlan:
    plan = plan_step(lengths, RANKS, min_rows=1)
    assert plan is not None
    return plan


def step_of(plan: PcpPlan, rank: int) -> SplitStep:
    return SplitStep(plan, Alone(rank), GPU)  # type: ignore[arg-type]


LENGTHS = [[1, 9, 8, 1], [16], [1, 1, 2, 2, 30]]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_are_taken_and_gathered(monkeypatch: pytest.MonkeyPatch, lengths: list[int], rank: int) -> None:
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *args, **kwargs: None)
    plan = plan_of(lengths)
    with host_waits() as waits:
        step = step_of(plan, rank)
        mover = QueryMover(QueryExchange(plan), step.group, GPU)
        rows = torch.empty(plan.num_tokens, 4, device=GPU)
        own = step.take(rows)
        assert own is not None
        for whole in (step.gather(own), step.gather_last(own)):
            assert whole.shape == rows.shape and whole.device.type == GPU.type
        mover.hand_back(mover.collect(own), own)
    assert waits == []


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("lengths", LENGTHS)
def test_metadata_is_built(monkeypatch: pytest.MonkeyPatch, lengths: list[int], rank: int) -> None:
    monkeypatch.setattr(pcp_step, "mamba_get_block_table_tensor", lambda table, *args: table)
    plan, requests = plan_of(lengths), len(lengths)
    builder: Any = SimpleNamespace(build=lambda prefix, common: common, use_full_cuda_graph=False, kv_cache_spec=None)
    whole: Any = None
    with host_waits() as waits:
        batch = pcp_step.StepBatch.__new__(pcp_step.StepBatch)
        batch.plan, batch.rank, batch.device, batch.segments = plan, rank, GPU, plan.segments(rank)
        batch.seq_lens, batch.mamba_cache_mode, batch.prefilling = (
            [7 + rows for rows in lengths],
            "none",
            [False] * requests,
        )
        table = torch.empty(requests, 3, dtype=torch.int32, device=GPU)
        slots = torch.empty(plan.num_tokens, dtype=torch.int64, device=GPU)
        batch.common(batch.local_queries(), table, slots)
        pcp_step._recurrent_metadata(builder, batch, table, slots, whole)
    assert waits == []


def layer(prefix: str) -> Any:
    return SimpleNamespace(
        prefix=prefix, num_k_heads=KEY_HEADS, num_v_heads=VALUE_HEADS, tp_size=1, head_k_dim=SIZE, head_v_dim=SIZE,
        conv_kernel_size=TAPS, activation="silu", A_log=None, dt_bias=None,
        conv1d=SimpleNamespace(weight=torch.empty(CHANNELS, 1, TAPS, device=GPU), bias=None),
        kv_cache=(
            torch.empty(5, TAPS - 1, CHANNELS, device=GPU), torch.empty(5, VALUE_HEADS, SIZE, SIZE, device=GPU)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", ["redundant", "relay", "two_pass"])
def test_recurrent_layers(monkeypatch: pytest.MonkeyPatch, mode: str, lengths: list[int], rank: int) -> None:
    """Around the scans themselves, which know their own waits."""
    plan = plan_of(lengths)
    for module in (relay, two_pass):
        monkeypatch.setattr(module, "scan_own_rows", lambda call: None)
    state = torch.Size([1, VALUE_HEADS, SIZE, SIZE])
    monkeypatch.setattr(two_pass, "gdn_prefill_segment", lambda *args, **kwargs: (torch.empty(state, device=GPU),) * 2)
    halos = HaloExchange.of(plan, TAPS - 1)  # reads values, of tensors on the host
    monkeypatch.setattr(HaloExchange, "of", lambda *args: halos)
    monkeypatch.setattr(CoreCall, "run_on", lambda *args: None)
    metadata: Any = object()
    with host_waits() as waits:
        step, names = step_of(plan, rank), ["first", "second"]
        slots = torch.arange(len(lengths), device=GPU)
        pooled = metadata if plan.segments(rank) else None
        for name in names:
            step.recurrent[name] = RecurrentMetadata(None, pooled, metadata, slots, slots[:1])
        for name in names:
            rows = plan.rows_per_rank
            mixed_qkv, b, a = (torch.empty(rows, width, device=GPU) for width in (CHANNELS, VALUE_HEADS, VALUE_HEADS))
            out = torch.empty(rows, VALUE_HEADS, SIZE, device=GPU)
            MODES[mode](CoreCall(engine_layer(lambda *args, **kwargs: None, layer(name)), step, mixed_qkv, b, a, out))
    assert waits == []


def test_waits_are_found() -> None:
    """What the other tests look for."""
    with host_waits() as waits:
        index = torch.tensor([1, 2], device=GPU)
        torch.zeros(2).to(GPU, non_blocking=True)
        torch.zeros(2).pin_memory().to(GPU)
        torch.zeros(2).pin_memory().to(GPU, non_blocking=True)
        index.cpu()
        assert len(waits) == 4, waits
        rows = torch.empty(5, 2, device=GPU)
        rows[index] = 0
        rows[torch.tensor([1])] = index.float()
        rows[rows[:, 0] > 1] = 0
        assert waits[4:] == ["aten.index_put_ with values from the host", "aten.index_put_ with places from the host"]
        del waits[4:]
        with pytest.raises(Exception, match="_local_scalar_dense"):
            index[0].item()
