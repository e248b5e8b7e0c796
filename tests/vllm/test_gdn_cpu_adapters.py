"""What the CPU patches of vLLM call, without an engine: padding, routing, ragged collectives, conditions."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from atom_patches.core import PatchError
from atom_patches.vllm.adapters import cpu_expert_map, gdn_cpu, no_accelerator, ragged_collectives
from atom_patches.vllm.adapters.host_memory import copy_ranges
from atom_patches.vllm.cpu import _conditions
from tests.vllm.gdn_oracle import free_port

HK, HV, K, V, W = 2, 4, 8, 6, 4
DIM = 2 * HK * K + HV * V


class Layer:
    """One GatedDeltaNet layer's weights and caches for requests in blocks 1, 2, ..."""

    def __init__(self, blocks: int) -> None:
        gen = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen)

        self.conv_weight, self.a_log, self.dt_bias = normal(DIM, W), normal(HV), normal(HV)
        self.conv = torch.zeros(blocks, W - 1, DIM).transpose(1, 2)
        self.state = torch.zeros(blocks, HV, V, K)
        self.inputs = lambda n: (normal(n, DIM), normal(n, HV), normal(n, HV))

    def prefill(self, x: Tensor, a: Tensor, b: Tensor, lengths: list[int], blocks: list[int], resumed: bool) -> Tensor:
        """The sequence of calls of upstream's layer for a batch with prefills."""
        cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        index = torch.tensor(blocks, dtype=torch.int32)
        has_state = torch.full((len(blocks),), resumed)
        y = gdn_cpu.causal_conv1d_fn(
            x.T, self.conv_weight, None, activation="silu", conv_states=self.conv, has_initial_state=has_state,
            cache_indices=index, query_start_loc=cu, metadata=None,
        ).T  # fmt: skip
        q, k, v, g, beta = gdn_cpu.fused_post_conv_prep(y, a, b, self.a_log, self.dt_bias, HK, K, V)
        start = self.state[index]
        start[~has_state] = 0
        out, final = gdn_cpu.chunk_gated_delta_rule(
            q[None], k[None], v[None], g[None], beta[None], initial_state=start, output_final_state=True, cu_seqlens=cu
        )
        assert final is not None
        self.state[index] = final
        return out[0]

    def decode(self, x: Tensor, a: Tensor, b: Tensor, blocks: list[int], packed: bool) -> Tensor:
        """The sequence of calls of upstream's layer for a batch of decodes, by either of its two ways."""
        index = torch.tensor(blocks, dtype=torch.int32)
        y = gdn_cpu.causal_conv1d_update(x, self.conv, self.conv_weight, None, "silu", conv_state_indices=index)
        if packed:
            out = torch.full((len(blocks), 1, HV, V), float("nan"))
            gdn_cpu.fused_recurrent_gated_delta_rule_packed_decode(
                y, a, b, self.a_log, self.dt_bias, K**-0.5, self.state, out, index, use_qk_l2norm_in_kernel=True
            )
            return out[:, 0]
        q, k, v = y.split([HK * K, HK * K, HV * V], dim=1)
        out, _ = gdn_cpu.fused_sigmoid_gating_delta_rule_update(
            self.a_log, a, b, self.dt_bias, q.view(1, -1, HK, K), k.view(1, -1, HK, K), v.view(1, -1, HV, V),
            initial_state=self.state, cu_seqlens=torch.arange(len(blocks) + 1), ssm_state_indices=index,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out[0]


@pytest.mark.parametrize("packed", [True, False])
def test_decode_continues_a_prefill(packed: bool) -> None:
    whole, parts = Layer(3), Layer(3)
    x, a, b = whole.inputs(7)
    want = whole.prefill(x, a, b, [7], [2], resumed=False)
    got = [parts.prefill(x[:4], a[:4], b[:4], [4], [2], resumed=False)]
    got += [parts.decode(x[t : t + 1], a[t : t + 1], b[t : t + 1], [2], packed) for t in range(4, 7)]
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.state, whole.state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.conv, whole.conv)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("pad", [0, -1])
def test_padding_rows_give_zero_and_touch_no_block(packed: bool, pad: int) -> None:
    layer = Layer(4)
    layer.state[0] = layer.state[3] = layer.conv[0] = layer.conv[3] = float("nan")
    x, a, b = layer.inputs(3)
    out = layer.decode(x, a, b, [1, pad, 2], packed)
    assert not out[1].any() and out[[0, 2]].isfinite().all() and out[[0, 2]].any()
    assert layer.state[[0, 3]].isnan().all() and layer.state[[1, 2]].isfinite().all()
    assert layer.conv[[0, 3]].isnan().all()


def test_padding_sequences_of_a_prefill() -> None:
    layer = Layer(4)
    layer.conv[0] = layer.conv[3] = float("nan")
    x, a, b = layer.inputs(5)
    together = layer.prefill(x, a, b, [3, 0, 2], [1, 0, 2], resumed=False)
    alone = Layer(4)
    torch.testing.assert_close(alone.prefill(x[3:], a[3:], b[3:], [2], [2], resumed=False), together[3:])
    assert layer.conv[[0, 3]].isnan().all()


def test_chunk_lists() -> None:
    cu = torch.tensor([0, 130, 130, 131, 195], dtype=torch.int32)
    # Upstream numbers the sequences that have chunks, one after the other.
    assert gdn_cpu.prepare_chunk_indices(cu, 64).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]]
    assert gdn_cpu.prepare_chunk_offsets(cu, 64).tolist() == [0, 3, 3, 4, 5]


def test_what_is_not_served_is_named() -> None:
    layer = Layer(2)
    x, a, b = layer.inputs(1)
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="num_accepted_tokens.*speculative decoding"):
        gdn_cpu.causal_conv1d_update(
            x, layer.conv, layer.conv_weight, conv_state_indices=one, num_accepted_tokens=torch.tensor([1])
        )
    with pytest.raises(ValueError, match="block_idx_last_scheduled_token"):
        gdn_cpu.causal_conv1d_fn(
            x.T, layer.conv_weight, None, layer.conv, torch.tensor([0, 1]), one, block_idx_last_scheduled_token=one
        )
    q, k, v = torch.zeros(1, 2, HK, K), torch.zeros(1, 2, HK, K), torch.zeros(1, 2, HV, V)
    with pytest.raises(ValueError, match="at most one token"):
        gdn_cpu.fused_sigmoid_gating_delta_rule_update(
            layer.a_log, a.repeat(2, 1), b.repeat(2, 1), layer.dt_bias, q, k, v,
            initial_state=layer.state, cu_seqlens=torch.tensor([0, 2]), ssm_state_indices=one,
        )  # fmt: skip


def test_copy_ranges() -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    starts = torch.tensor([3, 40])
    copy_ranges(source.data_ptr() + starts, target.data_ptr() + torch.tensor([10, 0]), torch.tensor([5, 7]))
    assert target[10:15].tolist() == list(range(3, 8)) and target[:7].tolist() == list(range(40, 47))
    assert target.count_nonzero() == 12


def test_no_accelerator_is_asked_to_synchronise() -> None:
    stock = torch.accelerator.synchronize
    with no_accelerator.without_synchronize():
        torch.accelerator.synchronize()
    assert torch.accelerator.synchronize is stock


# Expert parallelism


def moe(self: Any, layer: Any, x: Tensor, top_k: int, router_logits: Tensor, **rest: Any) -> Tensor:
    """A CPU expert kernel that knows local experts only: layer.weights [local experts, D, D]."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    names = ("use_grouped_topk", "renormalize", "topk_group", "num_expert_group", "custom_routing_function")
    names += ("scoring_func", "routed_scaling_factor", "e_score_correction_bias")
    routing = {name: rest[name] for name in names if name in rest}
    weights, experts = select_experts(hidden_states=x, router_logits=router_logits, top_k=top_k, **routing)
    chosen = torch.einsum("td,tkde->tke", x, layer.weights[experts.long()])
    return (chosen * weights[..., None]).sum(1)


@pytest.mark.parametrize("grouped", [False, True])
def test_ranks_with_some_experts_add_up_to_one_with_all(grouped: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    x, logits = torch.randn(9, 5, generator=gen), torch.randn(9, 6, generator=gen)
    weights = torch.randn(6, 5, 5, generator=gen)
    options = dict(x=x, top_k=2, router_logits=logits, renormalize=True, use_grouped_topk=grouped)
    options |= dict(topk_group=2, num_expert_group=3) if grouped else {}
    call = cpu_expert_map.with_local_experts(moe)
    want = call(None, SimpleNamespace(weights=weights), **options)
    parts = []
    for held in ([4, 0], [1, 2, 3, 5]):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[held] = torch.arange(len(held), dtype=torch.int32)
        parts.append(call(None, SimpleNamespace(weights=weights[held]), **options, expert_map=expert_map))
    torch.testing.assert_close(parts[0] + parts[1], want)
    assert not torch.equal(parts[0], want)


# Ragged collectives


def exchange(rank: int, ranks: int, port: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {}
    for sizes in ([3, 0, 2], [1, 1, 1]):
        rows = 10 * rank + torch.arange(sizes[rank] * 2.0).view(-1, 2)
        first, second = ragged_collectives.all_gatherv(group, [rows, rows[:, 0]], 0, sizes)
        found[f"gather{sizes}"] = first.tolist(), second.tolist()
        total = torch.arange(sum(sizes) * 2.0).view(-1, 2) * (rank + 1)
        found[f"reduce{sizes}"] = ragged_collectives.reduce_scatterv(group, total, 0, sizes).tolist()
        found[f"transposed{sizes}"] = ragged_collectives.reduce_scatterv(group, total.T, -1, sizes).T.tolist()
    found["even"] = ragged_collectives.reduce_scatterv(group, torch.ones(6, 1), 0, None).tolist()
    found["gathered"] = ragged_collectives.all_gatherv(group, torch.full((2, 1), float(rank)), 0, None).tolist()  # pyright: ignore[reportAttributeAccessIssue]
    for call in (
        lambda: ragged_collectives.all_gatherv(group, torch.ones(4), 0, [1, 1, 1]),
        lambda: ragged_collectives.reduce_scatterv(group, torch.ones(4), 0, [1, 1, 1]),
    ):
        with pytest.raises(ValueError, match="rows"):
            call()
    results[rank] = found
    dist.destroy_process_group()


def test_ragged_collectives() -> None:
    ranks = 3
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        spawn(exchange, (ranks, free_port(), results), nprocs=ranks)
        found = [results[rank] for rank in range(ranks)]
    for sizes in ([3, 0, 2], [1, 1, 1]):
        rows = [10 * rank + torch.arange(size * 2.0).view(-1, 2) for rank, size in enumerate(sizes)]
        total = (torch.arange(sum(sizes) * 2.0).view(-1, 2) * 6).split(sizes)
        for rank in range(ranks):
            gathered = torch.cat(rows)
            assert found[rank][f"gather{sizes}"] == (gathered.tolist(), gathered[:, 0].tolist())
            assert found[rank][f"reduce{sizes}"] == total[rank].tolist()
            assert found[rank][f"transposed{sizes}"] == total[rank].tolist()
    assert all(one["even"] == [[3.0]] * 2 for one in found)
    assert all(one["gathered"] == [[0.0]] * 2 + [[1.0]] * 2 + [[2.0]] * 2 for one in found)


# Conditions


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as the conditions read."""
    facts = (
        dict(device="cpu", hybrid=True, gdn=True, moe=False, tp=1, dp=1, pcp=1, ep=False, speculative=None, eager=True)
        | changes
    )
    text = SimpleNamespace(model_type="qwen3_next", **({"linear_num_value_heads": 4} if facts["gdn"] else {}))
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=facts["device"]),
        model_config=SimpleNamespace(
            is_hybrid=facts["hybrid"],
            is_moe=facts["moe"],
            use_mla=False,
            hf_text_config=text,
            enforce_eager=facts["eager"],
        ),  # fmt: skip
        speculative_config=facts["speculative"],
        parallel_config=SimpleNamespace(
            tensor_parallel_size=facts["tp"],
            data_parallel_size=facts["dp"],
            prefill_context_parallel_size=facts["pcp"],
            enable_expert_parallel=facts["ep"],
        ),
    )


@pytest.mark.parametrize(
    ("changes", "gdn", "dp_moe", "ep", "served"),
    [
        ({}, True, False, False, True),
        ({"device": "cuda", "moe": True, "dp": 2, "ep": True, "pcp": 2}, False, False, False, False),
        ({"gdn": False}, False, False, False, False),
        ({"hybrid": False}, False, False, False, False),
        ({"gdn": False, "pcp": 2}, False, False, False, True),
        ({"moe": True, "dp": 2}, True, True, False, True),
        ({"gdn": False, "moe": True, "dp": 2}, False, True, False, True),
        ({"gdn": False, "dp": 2}, False, False, False, False),
        ({"gdn": False, "moe": True, "ep": True}, False, False, False, False),
        ({"gdn": False, "moe": True, "ep": True, "tp": 2}, False, False, True, True),
        ({"gdn": False, "ep": True, "tp": 2}, False, False, False, False),
    ],
)
def test_conditions(changes: dict[str, Any], gdn: bool, dp_moe: bool, ep: bool, served: bool) -> None:
    given = config(**changes)
    verdicts = [
        condition(given)
        for condition in (
            _conditions.gated_delta_net,
            _conditions.data_parallel_moe,
            _conditions.expert_parallel,
            _conditions.served,
        )
    ]
    assert [verdict.ok for verdict in verdicts] == [gdn, dp_moe, ep, served]
    assert all(verdict.reason for verdict in verdicts)


def test_a_configuration_without_a_model_asks_for_nothing() -> None:
    given = config()
    given.model_config = None
    assert not _conditions.gated_delta_net(given).ok and not _conditions.data_parallel_moe(given).ok


def test_compiled_experts_of_data_parallel_ranks_are_refused_by_name() -> None:
    with pytest.raises(PatchError, match="compilation is on.* 2 data-parallel ranks .*pass --enforce-eager"):
        _conditions.data_parallel_moe(config(moe=True, dp=2, eager=False))
    for changes in ({"moe": True}, {"dp": 2}, {"moe": True, "dp": 2, "device": "cuda"}):
        assert not _conditions.data_parallel_moe(config(eager=False, **changes)).ok
    assert _conditions.served(config(moe=True, dp=2, eager=False)).ok, "says no more than it has to"


def test_speculative_decoding_is_refused_by_name() -> None:
    with pytest.raises(PatchError, match="--speculative-config.*ngram.*qwen3_next.*Start without"):
        _conditions.gated_delta_net(config(speculative=SimpleNamespace(method="ngram")))
    assert not _conditions.gated_delta_net(config(speculative=SimpleNamespace(method="ngram"), gdn=False)).ok
    assert _conditions.served(config(speculative=SimpleNamespace(method="ngram"))).ok, "says no more than it has to"
