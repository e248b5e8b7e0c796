"""Recurrent layers of a split step on 2 to 8 ranks in threads, against one scan of everything: outputs and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels.gdn_chain import gdn_prefill
from atom_patches.models.gdn_core import GdnWeights
from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_gdn_cost import Mode
from atom_patches.vllm.adapters.models import recurrence
from atom_patches.vllm.adapters.models.recurrence import RecurrentLayer
from atom_patches.vllm.adapters.pcp_gdn import MODES, final_states, own_rows
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
from atom_patches.vllm.adapters.pcp_gdn.core_layer import engine_layer
from atom_patches.vllm.adapters.pcp_step import RecurrentMetadata, SplitStep
from tests.vllm.ranks_in_threads import Group, all_to_all_single, run_ranks

KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 4, 8, 4, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
CLOSE: dict[str, Any] = dict(atol=3e-4, rtol=3e-4)


class Layer:
    """A layer's weights, its inputs for all rows of a step, and the slots of the step's requests in its cache.

    Requests without earlier tokens begin in slots that others have left.
    """

    def __init__(self, prefix: str, lens: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        requests, rows = len(lens), sum(lens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.prefix = prefix
        self.mixed_qkv, self.a, self.b = draw(rows, CHANNELS), draw(rows, VALUE_HEADS), draw(rows, VALUE_HEADS)
        self.weight, self.A_log, self.dt_bias = draw(CHANNELS, TAPS), draw(VALUE_HEADS) - 3, draw(VALUE_HEADS)
        self.conv = draw(2 * requests, TAPS - 1, CHANNELS)
        self.recurrent = draw(2 * requests, VALUE_HEADS, SIZE, SIZE)
        self.slots = torch.randperm(2 * requests, generator=generator)[:requests]
        self.fresh = self.slots[torch.rand(requests, generator=generator) < 0.3]

    def on_a_rank(self) -> Any:
        """vLLM's layer, as far as it is asked, with a cache of its own."""
        return SimpleNamespace(
            prefix=self.prefix, num_k_heads=KEY_HEADS, num_v_heads=VALUE_HEADS, tp_size=1, head_k_dim=SIZE,
            head_v_dim=SIZE, conv_kernel_size=TAPS, activation="silu", A_log=self.A_log, dt_bias=self.dt_bias,
            conv1d=SimpleNamespace(weight=self.weight[:, None], bias=None),
            kv_cache=(self.conv.clone(), self.recurrent.clone()),
        )  # fmt: skip

    def of_atom(self) -> Any:
        """The ATOM decoder's, likewise."""
        layer: Any = RecurrentLayer.__new__(RecurrentLayer)
        layer._prefix, layer._shapes = self.prefix, ((TAPS - 1, CHANNELS), (VALUE_HEADS, SIZE, SIZE))
        layer._weights = lambda: GdnWeights(self.weight, self.A_log, self.dt_bias)
        layer._run = _no_core
        layer.kv_cache = (self.conv.clone(), self.recurrent.clone())
        return layer

    def whole(self, plan: PcpPlan) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs of all rows and both states of every slot, by one scan."""
        conv, recurrent = self.conv.clone(), self.recurrent.clone()
        conv[self.fresh], recurrent[self.fresh] = 0, 0
        out = gdn_prefill(
            self.mixed_qkv, self.a, self.b, conv_weight=self.weight, conv_bias=None, conv_state=conv.mT,
            ssm_state=recurrent, slots=self.slots, has_initial_state=torch.ones(len(self.slots), dtype=torch.bool),
            cu_seqlens=torch.tensor(plan.query_start_loc), A_log=self.A_log, dt_bias=self.dt_bias, null_slot=None,
        )  # fmt: skip
        return out, conv, recurrent


def run_rank(mode: Mode, plan: PcpPlan, layers: list[Layer], group: Group) -> list[tuple[Tensor, ...]]:
    """What one rank's layers give for its rows, and the states in their slots afterwards."""
    step = SplitStep(plan, group, torch.device("cpu"))  # type: ignore[arg-type]
    pooled: Any = object() if plan.segments(step.rank) else None
    whole: Any = None
    for layer in layers:
        step.recurrent[layer.prefix] = RecurrentMetadata(None, pooled, whole, layer.slots, layer.fresh)
    found = []
    for layer in layers:
        local, out = layer.on_a_rank(), torch.zeros(plan.rows_per_rank, VALUE_HEADS, SIZE)
        mixed_qkv, b, a = (tensor[step.local_rows] for tensor in (layer.mixed_qkv, layer.b, layer.a))
        MODES[mode](CoreCall(engine_layer(_no_core, local), step, mixed_qkv, b, a, out))
        found.append((out[step.own_rows], local.kv_cache))
    return [
        (out, *(cache[layer.slots] for cache in caches)) for (out, caches), layer in zip(found, layers, strict=True)
    ]


def run_rank_of_atom(plan: PcpPlan, layer: Layer, group: Group, padding: int) -> tuple[Tensor, ...]:
    """The same of a layer of an ATOM decoder, whose rows a graph has padded; the rows of padding last."""
    step = SplitStep(plan, group, torch.device("cpu"))  # type: ignore[arg-type]
    pooled: Any = object() if plan.segments(step.rank) else None
    whole: Any = None
    step.recurrent[layer.prefix] = RecurrentMetadata(None, pooled, whole, layer.slots, layer.fresh)
    local = layer.of_atom()
    own = (tensor[step.local_rows] for tensor in (layer.mixed_qkv, layer.b, layer.a))
    rows = [torch.cat([one, one.new_full((padding, one.shape[1]), torch.nan)]) for one in own]
    out = torch.full((len(rows[0]), VALUE_HEADS, SIZE), torch.nan)
    local._own_rows(step, *rows, out)
    return out[step.own_rows], *(cache[layer.slots] for cache in local.kv_cache), out[step.own_rows.stop :]


def _no_core(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the engine's core was asked")


query_lens = st.lists(st.one_of(st.integers(2, 9), st.integers(2, 70)), min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def _own_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands for a kernel of the package; final states travel two at a time."""
    monkeypatch.setattr(own_rows, "NOT_OURS", ())
    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(final_states, "PACKED_BYTES", 2 * 4 * (CHANNELS * (TAPS - 1) + VALUE_HEADS * SIZE**2))


def check(mode: Mode, lens: list[int], ranks: int, seed: int) -> None:
    plan = plan_step(lens, ranks, min_rows=1)
    if plan is None:
        return
    layers = [Layer(f"layer{at}", lens, seed + at) for at in range(3)]
    results = run_ranks(ranks, lambda group: run_rank(mode, plan, layers, group))
    for at, layer in enumerate(layers):
        out, conv, recurrent = layer.whole(plan)
        for rank, result in enumerate(results):
            torch.testing.assert_close(result[at][0], out[slice(*plan.slice_bounds(rank))], **CLOSE)
            torch.testing.assert_close(result[at][1], conv[layer.slots], **CLOSE)
            torch.testing.assert_close(result[at][2], recurrent[layer.slots], **CLOSE)
            # All ranks go on from the same bits.
            assert all(torch.equal(one, other) for one, other in zip(result[at][1:], results[0][at][1:], strict=True))


@pytest.mark.parametrize("mode", ["relay", "two_pass"])
@settings(deadline=None, max_examples=25)
@given(query_lens, st.integers(2, 8), st.integers(0, 2**16))
def test_states_that_are_handed_on(mode: Mode, lens: list[int], ranks: int, seed: int) -> None:
    check(mode, lens, ranks, seed)


@settings(deadline=None, max_examples=15)
@given(query_lens, st.sampled_from([2, 4]), st.integers(0, 2**16))
def test_heads_that_are_dealt_out(lens: list[int], ranks: int, seed: int) -> None:
    check("head_all_to_all", lens, ranks, seed)


@pytest.mark.parametrize("mode", ["relay", "two_pass", "head_all_to_all"])
@settings(deadline=None, max_examples=10)
@given(query_lens, st.sampled_from([2, 4]), st.integers(0, 2**16), st.integers(0, 5))
def test_a_layer_of_an_atom_decoder(mode: Mode, lens: list[int], ranks: int, seed: int, padding: int) -> None:
    """What it gives for rows of padding goes on into the layers that follow: nothing that was in memory before."""
    plan = plan_step(lens, ranks, min_rows=1)
    if plan is None:
        return
    layer = Layer("layer", lens, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "run_core", MODES[mode])
        results = run_ranks(ranks, lambda group: run_rank_of_atom(plan, layer, group, padding))
    out, conv, recurrent = layer.whole(plan)
    for rank, (own, own_conv, own_recurrent, padded) in enumerate(results):
        torch.testing.assert_close(own, out[slice(*plan.slice_bounds(rank))], **CLOSE)
        torch.testing.assert_close(own_conv, conv[layer.slots], **CLOSE)
        torch.testing.assert_close(own_recurrent, recurrent[layer.slots], **CLOSE)
        assert len(padded) == padding + plan.padding(rank) and not padded.any()


@pytest.mark.parametrize("mode", ["relay", "two_pass"])
@pytest.mark.parametrize("lens", [[300], [2, 2, 2, 2], [5, 90, 3], [2] * 20], ids=["one", "tiny", "unequal", "many"])
def test_some_steps_on_eight_ranks(mode: Mode, lens: list[int]) -> None:
    check(mode, lens, 8, seed=3)
