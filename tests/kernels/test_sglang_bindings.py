"""What bindings to SGLang add to its kernels, for which stand-ins compute here, and what they refuse."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import contract
from atom_patches.kernels.causal_conv1d import CAUSAL_CONV1D
from atom_patches.kernels.fused_moe import MOE_ROUTING, ROUTING_TOLERANCE
from atom_patches.kernels.merge_attention import MERGE_ATTENTION, TOLERANCE
from atom_patches.kernels.mla_attention import MLA_ATTENTION, SPARSE_MLA_ATTENTION, mla_cache_write
from atom_patches.kernels.mla_attention import TOLERANCE as ATTENTION_TOLERANCE
from atom_patches.kernels.registry import Operation
from atom_patches.kernels.sparse_indexer import (
    INDEXER_CACHE_GATHER,
    INDEXER_LOGITS,
    INDEXER_LOGITS_PAGED,
    LOCAL_TO_PAGED,
    TOPK_INDICES,
    indexer_cache_write,
)

pytestmark = pytest.mark.skipif(harness.GPU, reason="SGLang's own kernels run here")

CONV = "sglang.srt.layers.attention.mamba.causal_conv1d"
Bound = Callable[..., ModuleType]


@contextlib.contextmanager
def stand_ins() -> Iterator[Bound]:
    """Within it, a binding is imported over stand-ins: modules by their names, with their functions."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:

        def load(family: str, **modules: dict[str, Any]) -> ModuleType:
            for name, functions in modules.items():
                parts = name.split(".")
                for i in range(1, len(parts) + 1):
                    module = sys.modules.get(".".join(parts[:i])) or ModuleType(parts[i - 1])
                    patch.setitem(sys.modules, ".".join(parts[:i]), module)
                vars(sys.modules[name]).update(functions)
            return importlib.import_module(f"atom_patches.sglang.kernels.{family}")

        yield load
    for name in set(sys.modules) - before:
        if name.startswith("atom_patches.sglang.kernels."):
            del sys.modules[name]


@pytest.fixture
def bound() -> Iterator[Bound]:
    with stand_ins() as load:
        yield load


def agree(operation: Operation, binding: ModuleType, call: tuple[Any, ...], tolerance: tuple[float, float]) -> None:
    """What the binding serves is the reference's, laid out as promised, on allocations that hold NaN."""
    verdict = getattr(binding, f"supports_{operation.name}")(*call)
    assert verdict.ok, verdict.reason
    with harness.poisoned():
        found = contract.results_of(operation, getattr(binding, operation.name), contract.clones(call))
    wanted = contract.results_of(operation, operation.reference, contract.clones(call))
    for name, promised in harness.promises(operation, call).items():
        assert harness.layout(found[name]) == harness.layout(promised), name
        contract.compare(name, found[name], wanted[name], tolerance)


def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """+inf means no keys; where neither part has any, zero is divided by zero. The log-sum-exps are read in line."""
    assert lse_a.is_contiguous() and lse_b.is_contiguous()
    lse_a, lse_b = (lse.masked_fill(lse.isinf(), -torch.inf) for lse in (lse_a, lse_b))
    peak = torch.maximum(lse_a, lse_b)
    weights = torch.stack([(lse_a - peak).exp(), (lse_b - peak).exp()])
    share = (weights / weights.sum(0))[..., None]
    return (out_a.float() * share[0] + out_b.float() * share[1]).to(out_a.dtype), peak + weights.sum(0).log()


def test_parts_without_keys(bound: Bound) -> None:
    binding = bound("merge_attention", sgl_kernel={"merge_state_v2": merged})
    generator = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 9, 3, 8, generator=generator), torch.randn(2, 3, 9, generator=generator).mT * 10
    for part, mark in ((0, -torch.inf), (1, torch.inf)):
        lses[part, part : part + 5] = mark
        outs[part, part : part + 5] = 0.0
    call = outs[0], lses[0], outs[1], lses[1]
    assert MERGE_ATTENTION.reference(*call)[1].isinf().any()
    agree(MERGE_ATTENTION, binding, call, TOLERANCE["float32"])


def routed(scores: Tensor, bias: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Strides of the bias are not asked for."""
    in_line = bias.as_strided(bias.shape, (1,))
    options = {"scaling": options["routed_scaling_factor"], "renormalize": options["renormalize"]}
    return MOE_ROUTING.reference(
        scores, topk, "sigmoid", options["renormalize"], in_line, 1, 1, options["scaling"]
    )  # fmt: skip


def test_a_routing_bias_with_other_values_in_between(bound: Bound) -> None:
    binding = bound(
        "fused_moe",
        **{
            "sgl_kernel": {"silu_and_mul": None},
            "sglang.kernels.ops.elementwise.elementwise": {"fused_gate_sigmoid_mul_add": None},
            "sglang.kernels.ops.moe.moe_fused_gate": {"moe_fused_gate": routed},
            "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe": {"fused_experts_impl": None},
            "sglang.srt.runtime_context": {"get_context": None},
            "sglang.srt.server_args": {"ServerArgs": None},
        },
    )
    generator = torch.Generator().manual_seed(1)
    logits, bias = torch.randn(5, 16, generator=generator), harness.spread(torch.randn(16, generator=generator))
    call = logits, 3, "sigmoid", True, bias, 1, 1, 1.0
    assert binding.supports_moe_routing(*call).ok
    found, wanted = (contract.outputs_of(run(*call)) for run in (binding.moe_routing, MOE_ROUTING.reference))
    for name, got in found.items():
        contract.compare(name, got, wanted[name], ROUTING_TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_rounded_to_the_inputs_dtype(bound: Bound, dtype: torch.dtype) -> None:
    binding = bound("causal_conv1d", **{CONV: {"causal_conv1d_fn": None, "causal_conv1d_update": None}})
    x, weight = torch.zeros(6, 8, dtype=dtype), torch.zeros(8, 4, dtype=dtype)
    state, slots = torch.zeros(3, 8, 3, dtype=dtype), torch.tensor([1, 2])
    call = x, weight, None, torch.tensor([0, 2, 6]), state, slots, torch.tensor([True, False]), "silu", 0
    verdict = binding.supports_causal_conv1d(*call)
    assert verdict.ok == (dtype == torch.float32)
    assert verdict.ok or f"rounds each product to {dtype}" in verdict.reason
    assert binding.supports_prefill(*call[:5], call[6]).ok, "within a layer it serves"
    assert binding.supports_causal_conv1d_update(x[:2], weight, None, state, slots, "silu", 0).ok
    assert CAUSAL_CONV1D.reference(*call).shape == x.shape


EXACT, NEAR = (0.0, 0.0), (1e-5, 1e-5)


class Keys:
    """SGLang's accessor: the first tokens of every request, page by page, one request behind the other."""

    @staticmethod
    def triton(
        pool: Any, buf: Tensor, page_indices: Tensor, seq_len_tensor: Tensor, seq_len_sum: int, max_seq_len: int
    ) -> tuple[Tensor, Tensor]:
        page, size = pool.page_size, pool.index_head_dim
        lengths = seq_len_tensor.tolist()
        assert sum(lengths) == seq_len_sum and max(lengths) <= max_seq_len and buf.shape[1] == page * (size + 4)
        key, scale = torch.empty(seq_len_sum, size, dtype=torch.uint8), torch.empty(seq_len_sum, 4, dtype=torch.uint8)
        places = ((row, p) for row, length in enumerate(lengths) for p in range(length))
        for at, (row, p) in enumerate(places):
            block = buf[int(page_indices[row, p // page])]
            key[at] = block[p % page * size :][:size]
            scale[at] = block[page * size + p % page * 4 :][:4]
        return key, scale


def selected(score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
    """The largest in an order of the kernel's own, counted from each row's start, then -1; 2048 of them only."""
    assert topk == 2048
    found = torch.full((score.shape[0], topk), -1, dtype=torch.int32)
    for t, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[t])
        best = score[t, start : start + max(length, 0)].topk(min(topk, max(length, 0))).indices
        found[t, : len(best)] = best.flip(0)
    return found


def mapped(page_table: Tensor, topk_indices: Tensor) -> Tensor:
    """Positions beyond the table are read all the same."""
    assert page_table.shape[0] == topk_indices.shape[0] and topk_indices.shape[1] == 2048
    assert int(topk_indices.max()) < page_table.shape[1]
    slots = page_table.gather(1, topk_indices.clamp(min=0).long())
    return slots.masked_fill(topk_indices < 0, -1)


def ragged(q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, ks: Tensor, ke: Tensor, clean_logits: bool) -> Tensor:
    """Rows lie as far apart as DeepGEMM likes."""
    assert not clean_logits
    wanted = INDEXER_LOGITS.reference(q, *kv, weights, ks, ke)
    rows, columns = wanted.shape
    return torch.empty(rows, columns + 24)[:, :columns].copy_(wanted)


def paged(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor, plan: object, most: int, clean_logits: bool
) -> Tensor:
    """Four dimensions of queries and of keys; rows are filled up to 256."""
    assert plan == "plan" and not clean_logits and lens.dim() == 2 and table.shape[0] == q.shape[0]
    call = q.squeeze(1), cache.squeeze(2), weights, table, None, lens.squeeze(1), most
    wanted = INDEXER_LOGITS_PAGED.reference(*call)
    return torch.empty(q.shape[0], -(-most // 256) * 256)[:, :most].copy_(wanted)


@pytest.fixture(scope="module")
def indexer() -> ModuleType:
    modules = {
        "sgl_kernel": {"fast_topk_v2": selected},
        "sglang.kernels.ops.attention.dsa.index_buf_accessor": {"GetKAndS": Keys},
        "sglang.kernels.ops.attention.dsa.transform_index": {"transform_index_page_table_decode": mapped},
        "sglang.srt.layers.deep_gemm_wrapper": {"ENABLE_JIT_DEEPGEMM": True},
        "sglang.srt.utils": {"is_cuda": lambda: True},
        "deep_gemm": {
            "fp8_mqa_logits": ragged,
            "fp8_paged_mqa_logits": paged,
            "get_num_sms": lambda: 132,
            "get_paged_mqa_logits_metadata": lambda lengths, page, processors: "plan",
        },
    }
    with stand_ins() as load:
        return load("sparse_indexer", **modules)


def index_cache(lengths: list[int], page: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys of 128 values in pages in any order, and the block table; the rest of the cache is NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page) for length in lengths]
    table = torch.zeros(len(lengths), max(1, *pages), dtype=torch.int32)
    order = torch.randperm(sum(pages) + 1, generator=generator).tolist()
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    cache = torch.full((sum(pages) + 1, page, 132), 0xFF, dtype=torch.uint8)
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        slots = table[row, position // page].long() * page + position % page
        indexer_cache_write(torch.randn(length, 128, generator=generator), slots, cache)
    return cache, table


@harness.examples(12)
@given(st.lists(st.integers(0, 130), min_size=2, max_size=4), st.sampled_from([1, 64]), st.integers(0, 2**31))
def test_keys_come_page_by_page(indexer: ModuleType, lengths: list[int], page: int, seed: int) -> None:
    """Also where requests end at the border of a page, one before it and one behind it."""
    lengths = [*lengths, 64, 63, 65]
    cache, table = index_cache(lengths, page, seed)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    agree(INDEXER_CACHE_GATHER, indexer, (cache, table, bounds, sum(lengths)), EXACT)


def fp8_queries(rows: int, heads: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, 128, generator=generator).to(torch.float8_e4m3fn)
    return q, torch.randn(rows, heads, generator=generator)


@pytest.mark.parametrize("rows", [1, 5])
def test_logits_in_rows_of_our_own(indexer: ModuleType, rows: int) -> None:
    q, weights = fp8_queries(rows, 32, seed=rows)
    key = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    end = torch.arange(70 - rows, 70, dtype=torch.int32)
    agree(INDEXER_LOGITS, indexer, (q, key, torch.rand(70), weights, torch.ones_like(end), end), NEAR)


@pytest.mark.parametrize("heads", [32, 64])
def test_paged_logits_of_any_width(indexer: ModuleType, heads: int) -> None:
    lengths = [64, 1, 130]
    cache, table = index_cache(lengths, 64, seed=heads)
    q, weights = fp8_queries(3, heads, seed=heads)
    call = q, cache, weights, table, None, torch.tensor(lengths, dtype=torch.int32), 140
    agree(INDEXER_LOGITS_PAGED, indexer, call, NEAR)


@harness.examples(12)
@given(st.integers(1, 4), st.integers(1, 2200), st.booleans(), st.integers(0, 2**31))
def test_a_selection_in_any_order(indexer: ModuleType, rows: int, columns: int, from_zero: bool, seed: int) -> None:
    """From ranges in which there are fewer than 2048, none, or which end before they begin."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(columns, generator=generator) for _ in range(rows)]).float()
    start, end = torch.randint(0, columns + 1, (2, rows), generator=generator).int()
    agree(TOPK_INDICES, indexer, (logits, None if from_zero else start, end, 2048, False), EXACT)


@harness.examples(20)
@given(st.integers(1, 4), st.integers(1, 3000), st.floats(0, 1), st.integers(0, 2**31))
def test_positions_of_nothing_stay_nothing(indexer: ModuleType, rows: int, width: int, empty: float, seed: int) -> None:
    """-1 anywhere in the row, and positions beyond the table; a slot 0 comes from the table only."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 10**6, (rows + 1, width), generator=generator).int()
    indices = torch.randint(0, width + 2, (rows, 2048), generator=generator).int()
    indices[torch.rand(rows, 2048, generator=generator) < empty] = -1
    agree(LOCAL_TO_PAGED, indexer, (indices, None, table, 1), EXACT)


def test_what_sglangs_indexer_does_not_serve(indexer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, end = torch.zeros(2, 3000), torch.tensor([3, 4], dtype=torch.int32)
    assert "which of equal logits" in indexer.supports_topk_indices(logits, None, end, 2048, True).reason
    assert "selects 2048, not 1024" in indexer.supports_topk_indices(logits, None, end, 1024, False).reason
    positions, table = torch.zeros(2, 2048, dtype=torch.int32), torch.zeros(2, 9, dtype=torch.int32)
    assert "single tokens" in indexer.supports_local_to_paged(positions, None, table, 64).reason
    assert "maps 2048" in indexer.supports_local_to_paged(positions[:, :512], None, table, 1).reason
    q, weights = fp8_queries(2, 16, seed=0)
    cache, _ = index_cache([3, 4], 1, seed=0)
    assert "blocks of 64" in indexer.supports_indexer_logits_paged(q, cache, weights, table, None, end, 9).reason
    call = q, q[:, 0], torch.ones(2), weights, end, end
    assert "32 or 64 heads" in indexer.supports_indexer_logits(*(x.contiguous() for x in call)).reason
    monkeypatch.setattr(indexer, "ENABLE_JIT_DEEPGEMM", False)
    assert "no DeepGEMM" in indexer.supports_indexer_logits(*(x.contiguous() for x in call)).reason


def sparse_by_the_block(q: Tensor, cache: Tensor, indices: Tensor, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Whole blocks of heads, and slots by the 128; queries without keys are marked with +inf."""
    assert q.is_contiguous() and q.shape[1] % 64 == 0 and indices.shape[1] % 128 == 0
    out, lse = SPARSE_MLA_ATTENTION.reference(q, cache, indices, scale, None, size)
    return out, lse.masked_fill(lse.isneginf(), torch.inf)


def over_rows(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int) -> tuple[Tensor, None, Tensor]:
    assert kv.dim() == 3 and kv.shape[1] == indices.shape[1] == 1
    out, lse = sparse_by_the_block(q, kv, indices.squeeze(1), sm_scale, d_v)
    return out, None, lse / math.log(2)  # this kernel's are of powers of two


def over_blocks(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    softmax_scale: float,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries have a dimension of their own in every sequence, and heads come first in the log-sum-exp."""
    assert tile_scheduler_metadata == "plan" and k_cache.shape[1:3] == (64, 1) and q.shape[1] == 1
    q, cache = q.squeeze(1), k_cache.squeeze(2)
    if indices is not None:
        assert is_fp8_kvcache and not causal and block_table is None and cache_seqlens is None
        out, lse = sparse_by_the_block(q, cache, indices.squeeze(1), softmax_scale, head_dim_v)
    else:
        assert causal and cache_seqlens is not None and block_table is not None
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
        most = int(cache_seqlens.max())
        call = q, cache, block_table, starts, cache_seqlens, 1, most, softmax_scale, None, head_dim_v
        out, lse = MLA_ATTENTION.reference(*call)
        lse = lse.masked_fill(lse.isneginf(), torch.inf)
    return out.unsqueeze(1), lse.unsqueeze(2)


@pytest.fixture(scope="module")
def attention() -> Iterator[ModuleType]:
    flash_mla, kernels = ModuleType("flash_mla"), ModuleType("sgl_kernel")
    vars(flash_mla).update(
        flash_mla_sparse_fwd=over_rows, flash_mla_with_kvcache=over_blocks, get_mla_metadata=lambda: ("plan", None)
    )
    vars(kernels).update(dense_decode_fwd=None, sparse_decode_fwd=None, sparse_prefill_fwd=None)
    modules = {"sgl_kernel": {"flash_mla": flash_mla}, "sglang.srt.utils": {"is_cuda": lambda: True}}
    with stand_ins() as load:
        binding = load("mla_attention", **modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "sgl_kernel", kernels, raising=False)
        yield binding


def latents(slots: int, page: int, packed: bool, seed: int) -> Tensor:
    """A full cache of random latents."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(slots, 576, generator=generator).bfloat16()
    shape = slots // page, page, 656 if packed else 576
    cache = torch.zeros(shape, dtype=torch.uint8 if packed else torch.bfloat16)
    mla_cache_write(rows[:, :512], rows[:, 512:], torch.arange(slots), cache)
    return cache


@pytest.mark.parametrize(("packed", "page"), [(False, 1), (False, 64), (True, 64)])
@harness.examples(4)
@given(st.sampled_from([16, 64, 128]), st.floats(0, 1), st.integers(0, 2**31))
def test_slots_anywhere_in_the_row(
    attention: ModuleType, packed: bool, page: int, heads: int, empty: float, seed: int
) -> None:
    """-1 between slots that are in use, at the borders of pages too, and a query without any."""
    generator = torch.Generator().manual_seed(seed)
    cache = latents(192, page, packed, seed)
    indices = torch.randint(0, 192, (3, 128), generator=generator).int()
    indices[:, ::7] = torch.tensor([0, 63, 64, 127, 128, 191] * 4, dtype=torch.int32)[:19]
    indices[torch.rand(3, 128, generator=generator) < empty] = -1
    indices[1] = -1
    q = torch.randn(3, heads, 576, generator=generator).bfloat16()
    call = q, cache, indices, 0.07, None, 512
    agree(SPARSE_MLA_ATTENTION, attention, call, ATTENTION_TOLERANCE["bfloat16"])


def test_decode_over_whole_contexts(attention: ModuleType) -> None:
    cache = latents(256, 64, packed=False, seed=3)
    q = torch.randn(3, 16, 576, generator=torch.Generator().manual_seed(4)).bfloat16()
    table = torch.tensor([[2, 0], [1, 3], [3, 1]], dtype=torch.int32)
    lengths, starts = torch.tensor([64, 0, 65], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    call = q, cache, table, starts, lengths, 1, 65, 0.07, None, 512
    agree(MLA_ATTENTION, attention, call, ATTENTION_TOLERANCE["bfloat16"])


def test_what_flash_mla_does_not_serve(attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, indices = torch.zeros(2, 16, 576, dtype=torch.bfloat16), torch.zeros(2, 128, dtype=torch.int32)
    plain, packed = latents(64, 64, packed=False, seed=0), latents(64, 64, packed=True, seed=0)
    rest = 1.0, None, 512
    sparse = attention.supports_sparse_mla_attention
    assert "in blocks of 64, not 1" in sparse(q, packed.view(64, 1, 656), indices, *rest).reason
    assert "a scaled cache" in sparse(q, torch.zeros(1, 64, 576, dtype=torch.uint8), indices, *rest).reason
    assert "100 slots" in sparse(q, plain, indices[:, :100], *rest).reason
    monkeypatch.delattr(torch.ops.sgl_kernel, "sparse_decode_fwd")
    assert "without FlashMLA's sparse_decode_fwd" in sparse(q, packed, indices, *rest).reason
    assert sparse(q, plain, indices, *rest).ok
    table, lengths = indices[:, :1].contiguous(), torch.ones(2, dtype=torch.int32)
    call = q, plain.view(64, 1, 576), table, torch.arange(3, dtype=torch.int32), lengths, 1, 1, *rest
    assert "blocks of 64 tokens" in attention.supports_mla_attention(*call).reason
