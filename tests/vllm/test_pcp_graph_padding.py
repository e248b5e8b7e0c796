"""What a graph adds to a rank's rows reaches no other rank and no cache; and what a GPU's start checks and says."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import VllmConfig  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata  # noqa: E402

from atom_patches.core import PatchError  # noqa: E402
from atom_patches.runtime.pcp import plan_step  # noqa: E402
from atom_patches.vllm.adapters import pcp_attention, pcp_gdn, pcp_step, pcp_support  # noqa: E402
from atom_patches.vllm.adapters.pcp_step import SplitStep  # noqa: E402
from tests.vllm.ranks_in_threads import Group, run_ranks  # noqa: E402


def step_of(plan: Any, group: Group) -> SplitStep:
    return SplitStep(plan, group, torch.device("cpu"))  # type: ignore[arg-type]


def padded(rows: Any, padding: int) -> Any:
    """Rows as a graph has them: what follows is not to be read."""
    return torch.cat([rows, rows.new_full((padding, *rows.shape[1:]), float("nan"))])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), ranks=st.integers(2, 4), padding=st.integers(0, 9))
def test_the_cache_gets_the_steps_keys_and_no_padding(lengths: list[int], ranks: int, padding: int) -> None:
    plan = plan_step(lengths, ranks, min_rows=1)
    if plan is None:
        return
    whole = torch.arange(plan.num_tokens * 2.0).view(-1, 1, 2)
    slots = torch.cat([torch.arange(plan.num_tokens), torch.full((padding,), -1)])

    steps: dict[int, SplitStep] = {}  # of each thread; vLLM's forward context is one for the process

    def work(group: Group) -> list[Any]:
        written: list[Any] = []
        write = pcp_attention.gather_before_write(lambda self, layer, *arguments: written.extend(arguments))
        step = steps[threading.get_ident()] = step_of(plan, group)
        key = padded(whole[step.local_rows], padding)
        write(SimpleNamespace(), torch.nn.Module(), key, -key, key, slots)
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pcp_attention, "current_split_step", lambda: steps[threading.get_ident()])
        results = run_ranks(ranks, work)
    for key, value, _, written_slots in results:
        assert torch.equal(key, whole) and torch.equal(value, -whole)
        assert torch.equal(written_slots, slots[: plan.num_tokens])


def test_recurrent_layers_run_a_ranks_rows_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_patches.vllm.pcp import gated_delta_net

    seen: list[Any] = []
    monkeypatch.setattr(pcp_gdn, "run_core", seen.append)
    plan = plan_step([9, 8], 2, min_rows=1)
    assert plan is not None
    step = step_of(plan, Group(SimpleNamespace(size=2), 0))  # type: ignore[arg-type]
    core = gated_delta_net.run_own_rows(lambda *args: None)
    layer: Any = SimpleNamespace(
        prefix="layer", kv_cache=(), num_k_heads=1, num_v_heads=1, tp_size=1, head_k_dim=2, head_v_dim=2,
        conv1d=SimpleNamespace(weight=torch.zeros(6, 1, 4), bias=None), A_log=None, dt_bias=None, activation="silu",
    )  # fmt: skip
    rows = [torch.zeros(plan.rows_per_rank + 7, 2) for _ in range(4)]
    with set_forward_context(step, VllmConfig(), num_tokens=17):
        core(layer, *rows)
    [call] = seen
    for given_rows in (call.mixed_qkv, call.b, call.a, call.core_attn_out):
        assert len(given_rows) == plan.rows_per_rank
    assert call.core_attn_out.data_ptr() == rows[3].data_ptr()


def test_decodes_of_a_split_step_have_tensors_of_their_own() -> None:
    buffer = torch.arange(4, dtype=torch.int32)
    values = {name: None for name in GDNAttentionMetadata.__dataclass_fields__}
    metadata = GDNAttentionMetadata(**{**values, "non_spec_state_indices_tensor": buffer[:2], "num_decodes": 2})
    apart = pcp_step._apart(metadata)
    buffer.fill_(9)
    assert apart.non_spec_state_indices_tensor is not None and apart.num_decodes == 2
    assert apart.non_spec_state_indices_tensor.tolist() == [0, 1] and apart.non_spec_query_start_loc is None


@pytest.mark.parametrize("disabled", [True, False])
def test_a_gpu_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    link = SimpleNamespace(device_communicator=SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=disabled)))
    monkeypatch.setattr(pcp_support, "get_pcp_group", lambda: link)
    if disabled:
        with pytest.raises(PatchError, match="VLLM_DISABLE_PYNCCL"):
            pcp_support.check_link()
    else:
        pcp_support.check_link()


@pytest.mark.parametrize(("device", "rank", "lines"), [("cuda", 0, 1), ("cuda", 1, 0), ("cpu", 0, 0)])
def test_what_is_unproven_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, rank: int, lines: int
) -> None:
    monkeypatch.setattr(pcp_support, "get_world_group", lambda: SimpleNamespace(rank_in_group=rank))
    config: Any = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    with caplog.at_level(logging.WARNING, logger="atom_patches.pcp"):
        pcp_support.tell_unproven(config)
    assert len(caplog.records) == lines
