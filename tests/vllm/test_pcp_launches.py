"""What the host issues in a layer of a split step is as many operations as the cost models count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

from atom_patches.runtime import pcp_host  # noqa: E402
from atom_patches.runtime.pcp import PcpPlan, plan_step  # noqa: E402
from atom_patches.runtime.pcp_attention_split import QueryExchange  # noqa: E402
from atom_patches.runtime.pcp_gdn_cost import MODES, Mode  # noqa: E402
from atom_patches.vllm.adapters.pcp_attention import gather_key_value  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn import MODES as RUN  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn import head_all_to_all, relay, two_pass  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall  # noqa: E402
from atom_patches.vllm.adapters.pcp_gdn.core_layer import engine_layer  # noqa: E402
from atom_patches.vllm.adapters.pcp_queries import QueryMover  # noqa: E402
from atom_patches.vllm.adapters.pcp_step import RecurrentMetadata, SplitStep  # noqa: E402

KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 8, 16, 4, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
CPU = torch.device("cpu")
SEGMENT = 3
"""Kernels of `gdn_prefill_segment`: a convolution, all chunks, the scan."""

FREE = {
    "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "_unsafe_view",
}  # fmt: skip
"""Operations that start nothing on a device."""


class Issued(TorchDispatchMode):
    """Counts what starts something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += func.__name__.split(".")[0] not in FREE
        return func(*args, **(kwargs or {}))


class Alone:
    """A group whose other ranks bring what this one brings; counts collectives."""

    device_group = device_communicator = None

    def __init__(self, plan: PcpPlan, rank: int) -> None:
        self.rank_in_group, self.world_size, self.calls = rank, plan.world_size, 0

    def all_gather(self, rows: Tensor, dim: int) -> Tensor:
        self.calls += 1
        with _disable_current_modes():
            return torch.cat([rows] * self.world_size, dim=dim)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        self.calls += 1
        return tensor

    def send(self, tensor: Tensor, dst: int) -> None:
        self.calls += 1

    def recv(self, size: Any, dtype: Any, src: int) -> Tensor:
        self.calls += 1
        return torch.empty(size, dtype=dtype)


def step_of(rank: int, ranks: int) -> SplitStep:
    plan = plan_step([32 * ranks], ranks, min_rows=1)
    assert plan is not None
    return SplitStep(plan, Alone(plan, rank), CPU)  # type: ignore[arg-type]


def issued(step: SplitStep, run: Any) -> int:
    group: Any = step.group
    before = group.calls
    with Issued() as mode:
        run()
    return mode.count + group.calls - before


def layer(prefix: str) -> Any:
    return SimpleNamespace(
        prefix=prefix, num_k_heads=KEY_HEADS, num_v_heads=VALUE_HEADS, tp_size=1, head_k_dim=SIZE, head_v_dim=SIZE,
        conv_kernel_size=TAPS, activation="silu", A_log=torch.zeros(VALUE_HEADS), dt_bias=torch.zeros(VALUE_HEADS),
        conv1d=SimpleNamespace(weight=torch.zeros(CHANNELS, 1, TAPS), bias=None),
        kv_cache=(torch.zeros(5, TAPS - 1, CHANNELS), torch.zeros(5, VALUE_HEADS, SIZE, SIZE)),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_recurrent_layer(monkeypatch: pytest.MonkeyPatch, mode: Mode, ranks: int) -> None:
    """Around the scan of its own rows, which every mode has; of the rank with the most, layers of a step on average."""
    for module in (relay, two_pass):
        monkeypatch.setattr(module, "scan_own_rows", lambda call: None)
    monkeypatch.setattr(CoreCall, "run_on", lambda *args: None)
    counts = []
    for rank in range(ranks):
        step = step_of(rank, ranks)
        own: Any = step.group

        def exchanged(*args: Any, group: Any, own: Any = own) -> None:
            own.calls += 1

        monkeypatch.setattr(torch.distributed, "all_to_all_single", exchanged)
        state = torch.zeros(1, VALUE_HEADS, SIZE, SIZE)
        monkeypatch.setattr(two_pass, "gdn_prefill_segment", lambda *args, s=state, **kwargs: (s, s))
        pool = torch.zeros(step.plan.pool_size, VALUE_HEADS // ranks, SIZE)
        monkeypatch.setattr(head_all_to_all, "gdn_prefill", lambda *args, p=pool, **kwargs: p)
        metadata: Any = object()
        layers, slots = [layer(str(at)) for at in range(9)], torch.arange(1)
        for one in layers:
            step.recurrent[one.prefix] = RecurrentMetadata(None, metadata, metadata, slots, slots[:1])
        rows = step.plan.rows_per_rank
        qkv, b, a = (torch.zeros(rows, width) for width in (CHANNELS, VALUE_HEADS, VALUE_HEADS))
        out = torch.zeros(rows, VALUE_HEADS, SIZE)
        calls = [CoreCall(engine_layer(lambda *args: None, one), step, qkv, b, a, out) for one in layers]
        RUN[mode](calls[0])  # what the step's layers share
        counts.append(issued(step, lambda: [RUN[mode](call) for call in calls[1:]]) / len(calls[1:]))  # noqa: B023
    first_pass = SEGMENT if mode == "two_pass" else 0
    assert max(counts) + first_pass == pytest.approx(pcp_host.recurrent_launches(mode, step.plan), abs=1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_full_attention(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    step = step_of(rank, 2)
    group: Any = step.group

    def exchanged(*args: Any, **kwargs: Any) -> None:
        group.calls += 1

    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchanged)
    mover, rows = QueryMover(QueryExchange(step.plan), step.group, CPU), torch.zeros(step.plan.rows_per_rank, 4, SIZE)
    moved = issued(step, lambda: mover.hand_back(torch.empty_like(mover.collect(rows)), rows))
    assert moved == pcp_host.QUERIES
    layer: Any = SimpleNamespace(layer_name="attention")
    assert issued(step, lambda: gather_key_value(step, layer, rows, rows)) == pcp_host.KEYS_AND_VALUES
