"""The sparse attention backend and the indexer, step after step on SGLang's own pool, against attention by hand.

One layer with small projections; requests fill, decode and verify as SGLang's scheduler has them do. What a row may see
is worked out by hand from every token's own slot, and its attention in float64 from what the cache holds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang.srt import runtime_context  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache import memory_pool  # pyright: ignore[reportMissingImports]
from sglang.srt.model_executor.cuda_graph_config import (  # pyright: ignore[reportMissingImports]
    Backend,
    CudaGraphConfig,
    Phase,
    PhaseConfig,
    check_cuda_graph_backend,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # pyright: ignore[reportMissingImports]
from sglang.srt.model_executor.forward_context import (  # pyright: ignore[reportMissingImports]
    ForwardContext,
    forward_context,
)
from sglang.srt.model_executor.model_runner_components import (  # pyright: ignore[reportMissingImports]
    cuda_graph_setup,
)

from atom_patches.kernels.mla_attention.reference import read
from atom_patches.kernels.sparse_indexer import indexer_queries
from atom_patches.models import lightning_indexer
from atom_patches.models.lightning_indexer import IndexerShape, select
from atom_patches.sglang.adapters.sparse_mla.backend import SparseMlaBackend
from atom_patches.sglang.adapters.sparse_mla.caches import index_cache, latent_cache
from atom_patches.sglang.adapters.sparse_mla.indexer import SparseIndexer
from atom_patches.sglang.adapters.sparse_mla.step import Tables
from atom_patches.sglang.models import prefill_graphs as of_models
from atom_patches.sglang.sparse_mla import prefill_graphs
from tests.host_waits import GPU, host_waits

DEVICE = harness.DEVICE
HIDDEN, HEADS, LATENT, ROPE, TOP_K = 16, 16, 128, 32, 6
INDEX_HEADS, INDEX_SIZE, INDEX_ROPE = 2, 128, 16
WIDTH, REQUESTS, LAYER = 200, 4, 1
FP8 = torch.float8_e4m3fn
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CLOSE = 0.03 if DEVICE.type == "cuda" else 1e-4

#: The cache's dtype, and bytes or values of a row: as on any GPU, as on NVIDIA's in FP8, as on AMD's in FP8.
FORMATS = {
    "plain": (DTYPE, LATENT + ROPE),
    "packed": (FP8, LATENT + LATENT // 128 * 4 + ROPE * 2),
    "scaled": (FP8, LATENT + ROPE),
}
PAGED = [("plain", 1), ("plain", 64), ("packed", 64), ("scaled", 1)]


def a_pool(form: str, page: int, monkeypatch: pytest.MonkeyPatch, tokens: int = 1024) -> Any:
    """SGLang's, which has pages of one token on AMD's GPUs only."""
    monkeypatch.setattr(memory_pool, "_is_hip", page == 1)
    monkeypatch.setattr(memory_pool, "aiter_can_use_preshuffle_paged_mqa", lambda: False, raising=False)
    dtype, row = FORMATS[form]
    return memory_pool.DSATokenToKVPool(
        size=tokens, page_size=page, kv_lora_rank=LATENT, dtype=dtype, qk_rope_head_dim=ROPE, layer_num=2,
        device=str(DEVICE), index_head_dim=INDEX_SIZE, enable_memory_saver=False, kv_cache_dim=row,
    )  # fmt: skip


def an_indexer(seed: int) -> SparseIndexer:
    """One whose projections need no parallel state."""
    generator = torch.Generator().manual_seed(seed)
    made = SparseIndexer.__new__(SparseIndexer)
    nn.Module.__init__(made)

    def projection(size: int) -> tuple[Any, Tensor]:
        weight = torch.randn(size, HIDDEN, generator=generator).to(DEVICE, DTYPE)
        return (lambda x: (x @ weight.T, None)), weight

    made.shape = IndexerShape(INDEX_HEADS, INDEX_SIZE, INDEX_ROPE, TOP_K, False)
    made.wq_b, _ = projection(INDEX_HEADS * INDEX_SIZE)
    made.wk, _ = projection(INDEX_SIZE)
    made.weights_proj = SimpleNamespace(weight=projection(INDEX_HEADS)[1])
    made.k_norm = lambda key: key
    angle = torch.arange(WIDTH + 8)[:, None] * torch.rand(INDEX_ROPE // 2, generator=generator)
    made.rotary_emb = SimpleNamespace(cos_sin_cache=torch.cat([angle.cos(), angle.sin()], 1).to(DEVICE))
    return made


class World:
    """Requests, their tokens and where these lie; steps run the layer as SGLang's model would."""

    def __init__(self, pool: Any, seed: int = 0, per_request: int | None = None) -> None:
        self.pool, self.page = pool, pool.page_size
        self.generator = torch.Generator().manual_seed(seed)
        self.free = (torch.randperm(1024 // self.page - 1, generator=self.generator) + 1).tolist()
        self.slots_of = torch.zeros(REQUESTS + 1, WIDTH, dtype=torch.int32, device=DEVICE)
        self.tokens: list[Tensor] = [torch.empty(0, HIDDEN, device=DEVICE, dtype=DTYPE)] * (REQUESTS + 1)
        config = SimpleNamespace(
            index_n_heads=INDEX_HEADS, index_head_dim=INDEX_SIZE, qk_rope_head_dim=INDEX_ROPE, index_topk=TOP_K
        )
        self.backend = SparseMlaBackend(
            SimpleNamespace(  # pyright: ignore[reportArgumentType]
                token_to_kv_pool=pool,
                req_to_token_pool=SimpleNamespace(req_to_token=self.slots_of, size=REQUESTS),
                model_config=SimpleNamespace(hf_config=config),
                page_size=self.page,
                device=str(DEVICE),
                max_running_requests=REQUESTS,
                server_args=SimpleNamespace(
                    max_running_requests=None, speculative_num_draft_tokens=per_request, chunked_prefill_size=8,
                    max_prefill_tokens=64,
                ),
            )
        )  # fmt: skip
        self.indexer = an_indexer(seed)
        self.layer = SimpleNamespace(
            tp_q_head_num=HEADS, v_head_dim=LATENT, head_dim=LATENT + ROPE, layer_id=LAYER, scaling=0.1
        )
        self.w = {
            name: torch.randn(HIDDEN, size, generator=self.generator).to(DEVICE, DTYPE) * 0.5
            for name, size in (("q", HEADS * LATENT), ("q_rope", HEADS * ROPE), ("k", LATENT), ("k_rope", ROPE))
        }

    def batch(self, mode: ForwardMode, rows: dict[int, int], padding: int = 0) -> tuple[Any, Tensor]:
        """New tokens for requests (numbers from 1 on), as SGLang states them, and what is known of each token."""
        new = {line: torch.randn(n, HIDDEN, generator=self.generator).to(DEVICE, DTYPE) for line, n in rows.items()}
        slots, positions = list[int](), list[int]()
        for line, n in rows.items():
            before = len(self.tokens[line])
            for position in range(before, before + n):
                if position % self.page == 0:
                    self.slots_of[line, position] = self.free.pop() * self.page
                else:
                    self.slots_of[line, position] = self.slots_of[line, position - 1] + 1
                slots.append(int(self.slots_of[line, position]))
                positions.append(position)
            self.tokens[line] = torch.cat([self.tokens[line], new[line]])
        verify = mode.is_target_verify()
        lengths = [len(self.tokens[line]) - (rows[line] if verify else 0) for line in rows]
        decodes = mode.is_decode_or_idle() or verify
        each = max(rows.values(), default=1)
        more_requests = padding // each if decodes else 0
        wide = torch.tensor(lengths + [1] * more_requests)
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=len(rows) + more_requests,
            input_ids=torch.zeros(len(slots) + padding, dtype=torch.long, device=DEVICE),
            positions=torch.tensor(positions + [0] * padding, dtype=torch.long, device=DEVICE),
            req_pool_indices=torch.tensor([*rows, *[0] * more_requests], dtype=torch.long, device=DEVICE),
            seq_lens=wide.to(DEVICE), seq_lens_cpu=wide, out_cache_loc=torch.tensor(
                slots + [0] * padding, dtype=torch.long, device=DEVICE
            ),
            extend_seq_lens=torch.tensor(list(rows.values()), dtype=torch.int32, device=DEVICE),
            extend_seq_lens_cpu=list(rows.values()), spec_info=SimpleNamespace(draft_token_num=each),
        )  # fmt: skip
        x = torch.cat([*new.values(), torch.full((padding, HIDDEN), 9.0, device=DEVICE, dtype=DTYPE)])
        return batch, x

    def run(self, batch: Any, x: Tensor, captured: bool = False) -> tuple[Tensor | None, Tensor]:
        """What the indexer selected, and the layer's output [rows, heads, latent]."""
        begin = self.backend.init_forward_metadata_in_graph if captured else self.backend.init_forward_metadata
        begin(batch)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            chosen = self.indexer(x, x, batch.positions, batch, LAYER)
        q = (x @ self.w["q"]).view(-1, HEADS, LATENT).transpose(0, 1).contiguous().transpose(0, 1)
        return chosen, self.attend(q, x, batch, {} if chosen is None else {"topk_indices": chosen})

    def attend(self, q: Tensor, x: Tensor, batch: Any, given: dict[str, Any]) -> Tensor:
        key, rope = (x @ self.w["k"])[:, None], (x @ self.w["k_rope"])[:, None]
        layer: Any = self.layer
        out = self.backend.forward(q, key, key, layer, batch, q_rope=x @ self.w["q_rope"], k_rope=rope, **given)
        return out.view(-1, HEADS, LATENT)

    def check(self, rows: dict[int, int], chosen: Tensor | None, out: Tensor) -> None:
        """Against every row by hand."""
        row = 0
        for line, n in rows.items():
            length = len(self.tokens[line])
            for position in range(length - n, length):
                x = self.tokens[line][position]
                seen = self.visible(line, position, x)
                if chosen is not None:
                    got = sorted(slot for slot in chosen[row].tolist() if slot >= 0)
                    assert got == seen, f"request {line}, token {position}"
                expected = self.attention(x, seen)
                error = (out[row].double() - expected).abs().max() / expected.abs().max()
                assert error < CLOSE, f"request {line}, token {position}: off by {error:.3}"
                row += 1

    def visible(self, line: int, position: int, x: Tensor) -> list[int]:
        slots = self.slots_of[line, : position + 1].tolist()
        if len(slots) <= TOP_K:
            return sorted(slots)
        cos, sin = self.indexer.rotary_emb.cos_sin_cache[position][None].chunk(2, -1)
        q = self.indexer.wq_b(x[None])[0].view(1, INDEX_HEADS, INDEX_SIZE)
        gates = nn.functional.linear(x[None].float(), self.indexer.weights_proj.weight.float())
        fp8, weights = indexer_queries(q, gates, cos, sin)
        keys = torch.stack([self.key_at(slot) for slot in slots])
        scores = (torch.relu(fp8[0].double() @ keys.T) * weights[0].double()[:, None]).sum(0)
        order = sorted(range(len(slots)), key=lambda p: (-scores[p].item(), p))[:TOP_K]
        return sorted(slots[p] for p in order)

    def key_at(self, slot: int) -> Tensor:
        block = index_cache(self.pool, LAYER)[slot // self.page].flatten()
        place = slot % self.page
        at = self.page * INDEX_SIZE + place * 4
        values = block[place * INDEX_SIZE : (place + 1) * INDEX_SIZE].view(FP8).double()
        return values * block[at : at + 4].clone().view(torch.float32).double()

    def attention(self, x: Tensor, slots: list[int]) -> Tensor:
        cache = latent_cache(self.pool, LAYER)
        raw = cache.element_size() == 1 and cache.shape[-1] == LATENT + ROPE
        scale = torch.ones(1, device=DEVICE) if raw else None
        at = torch.tensor(slots, device=DEVICE)
        keys = read(cache, at, LATENT + ROPE, LATENT, scale).double()
        q = torch.cat([(x @ self.w["q"]).view(HEADS, LATENT), (x @ self.w["q_rope"]).view(HEADS, ROPE)], 1).double()
        return (q @ keys.T * self.layer.scaling).softmax(-1) @ keys[:, :LATENT]

    def step(self, mode: ForwardMode, rows: dict[int, int], padding: int = 0, captured: bool = False) -> Tensor | None:
        batch, x = self.batch(mode, rows, padding)
        chosen, out = self.run(batch, x, captured)
        self.check(rows, chosen, out)
        if chosen is not None:
            assert captured or (chosen[sum(rows.values()) :] == -1).all() or mode.is_decode_or_idle()
        return chosen


@pytest.fixture(params=PAGED, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    form, page = request.param
    return World(a_pool(form, page, monkeypatch))


def test_a_prompt_longer_than_may_be_selected_then_decoding(world: World) -> None:
    world.step(ForwardMode.EXTEND, {1: TOP_K + 9})
    for _ in range(3):
        world.step(ForwardMode.DECODE, {1: 1})


def test_triton_alone_serves_every_kind_of_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_KERNELS", "triton")
    world.step(ForwardMode.EXTEND, {1: TOP_K - 1, 2: 2})
    world.step(ForwardMode.MIXED, {1: 3, 2: 1}, padding=1)
    world.step(ForwardMode.DECODE, {2: 1, 1: 1}, padding=1, captured=True)
    world.step(ForwardMode.TARGET_VERIFY, {1: 2, 2: 2}, captured=True)


def test_nothing_is_selected_until_there_is_more(world: World) -> None:
    assert world.step(ForwardMode.EXTEND, {1: TOP_K - 2, 2: 1}) is None
    assert world.step(ForwardMode.DECODE, {1: 1, 2: 1}) is None
    assert world.step(ForwardMode.DECODE, {1: 1, 2: 1}) is None, "exactly as many as may be selected"
    assert world.step(ForwardMode.DECODE, {1: 1, 2: 1}) is not None, "the first sees one more"


def test_ragged_prefills_in_chunks_beside_decoding(world: World) -> None:
    world.step(ForwardMode.EXTEND, {1: 70, 2: 3})
    world.step(ForwardMode.EXTEND, {3: 20, 1: 9, 2: 1})
    world.step(ForwardMode.MIXED, {3: 5, 1: 1, 2: 1})
    world.step(ForwardMode.EXTEND, {3: 4, 2: 1}, padding=3)


def test_requests_that_share_a_prefix(world: World) -> None:
    """A prefix is shared in whole pages: the second request's table names the first one's slots."""
    world.step(ForwardMode.EXTEND, {1: 64 + 7})
    world.tokens[2] = world.tokens[1][:64]
    world.slots_of[2, :64] = world.slots_of[1, :64]
    world.step(ForwardMode.EXTEND, {2: 5})
    world.step(ForwardMode.DECODE, {2: 1, 1: 1})


@pytest.mark.parametrize("captured", [False, True])
def test_several_tokens_are_verified_at_once(world: World, captured: bool) -> None:
    world.step(ForwardMode.EXTEND, {1: TOP_K + 2, 2: 66})
    world.step(ForwardMode.TARGET_VERIFY, {1: 3, 2: 3}, padding=3 * captured, captured=captured)
    world.step(ForwardMode.TARGET_VERIFY, {2: 3, 1: 3}, captured=captured)


@pytest.mark.parametrize("longer", [0, TOP_K])
def test_verified_rows_are_padded_to_any_number(world: World, longer: int) -> None:
    """Ranks of one attention group share the rows of a step, which SGLang pads to a multiple of their number."""
    world.step(ForwardMode.EXTEND, {1: 2 + longer, 2: 1})
    world.step(ForwardMode.TARGET_VERIFY, {1: 3, 2: 3}, padding=2)


def test_a_captured_step_selects_like_any(world: World) -> None:
    world.step(ForwardMode.EXTEND, {1: 3, 2: 80, 3: TOP_K})
    for padding in (0, 2):
        world.step(ForwardMode.DECODE, {3: 1, 1: 1, 2: 1}, padding=padding, captured=True)


def test_padding_and_idle_ranks_leave_the_caches_alone(world: World) -> None:
    world.step(ForwardMode.EXTEND, {1: 20})
    before = [latent_cache(world.pool, LAYER).view(torch.uint8).clone(), index_cache(world.pool, LAYER).clone()]
    for mode, padding in ((ForwardMode.IDLE, 0), (ForwardMode.IDLE, 2)):
        chosen, out = world.run(*world.batch(mode, {}, padding))
        assert chosen is not None and chosen.shape == (padding, TOP_K) and (chosen == -1).all()
        assert out.shape[0] == padding and (out == 0).all()
    after = [latent_cache(world.pool, LAYER).view(torch.uint8), index_cache(world.pool, LAYER)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    world.step(ForwardMode.DECODE, {1: 1}, padding=1)
    first = [latent_cache(world.pool, LAYER)[0, 0].view(torch.uint8), index_cache(world.pool, LAYER)[0].flatten()[:128]]
    assert all((one == 0).all() for one in first), "padding writes nowhere"


def test_fp8_is_close_to_what_it_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """E4M3 alone costs 2.7 %."""
    outputs: dict[str, Tensor] = {}
    for form in ("plain", "packed"):
        world = World(a_pool(form, 64, monkeypatch))
        world.layer.scaling = 0.02  # scores of about one: larger ones make more of any rounding
        batch, x = world.batch(ForwardMode.EXTEND, {1: 90})
        outputs[form] = world.run(batch, x)[1].float()
    error = (outputs["packed"] - outputs["plain"]).norm() / outputs["plain"].norm()
    assert 0 < error < 0.04


def test_layers_keep_their_own_selection(world: World) -> None:
    """The buffer of selected slots is one; a layer must not attend with what the layer before it selected."""
    world.step(ForwardMode.EXTEND, {1: 30})
    first = world.step(ForwardMode.DECODE, {1: 1})
    assert first is not None
    kept = first.clone()
    world.indexer = an_indexer(seed=9)
    world.step(ForwardMode.EXTEND, {2: 30})
    second = world.step(ForwardMode.DECODE, {2: 1})
    assert second is not None and second.data_ptr() == first.data_ptr()
    assert not torch.equal(second, kept)


@pytest.mark.parametrize("patch", [prefill_graphs, of_models], ids=lambda patch: patch.PATCH.id)
@pytest.mark.parametrize("draft", [False, True])
def test_no_prefill_is_captured_and_schedulers_know(draft: bool, patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of data-parallel ranks ask the runner of captured prefills whether it can take a batch, if there is one."""
    config = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.BREAKABLE))
    published = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: published)
    runner = SimpleNamespace(is_draft_worker=draft, server_args=SimpleNamespace(cuda_graph_config=config))
    eager = object()
    found = patch.without_graphs(cuda_graph_setup.capture_prefill_graph)(model_runner=runner, eager_runner=eager)
    assert found.runner is (None if draft else eager)
    assert not check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE)


def test_a_layer_that_selected_nothing_is_an_error(world: World) -> None:
    batch, x = world.batch(ForwardMode.EXTEND, {1: TOP_K + 1})
    world.backend.init_forward_metadata(batch)
    with pytest.raises(RuntimeError, match="layer 1 selected nothing"):
        world.attend(x @ world.w["q"], x, batch, {})


def test_a_step_that_was_not_planned_is_an_error(world: World) -> None:
    batch, x = world.batch(ForwardMode.EXTEND, {1: 3})
    with pytest.raises(RuntimeError, match=r"no plan was made for this step \(EXTEND\)"):
        world.attend(x @ world.w["q"], x, batch, {})


def test_the_buffer_has_room_for_a_chunk_and_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a_pool("plain", 64, monkeypatch), per_request=3)
    assert world.backend.selected(0).untyped_storage().nbytes() == 4 * TOP_K * max(8, 3 * REQUESTS)
    assert world.backend.selected(100).shape == (100, TOP_K), "a larger step gets its own"


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_steps(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World(a_pool(*data.draw(st.sampled_from(PAGED)), patch), data.draw(st.integers(0, 5)))
        object.__setattr__(world.backend.tables, "workspace", world.indexer.shape.workspace(data.draw(
            st.sampled_from([1, 20_000, 100_000_000])
        )))  # fmt: skip
        for _ in range(data.draw(st.integers(1, 5))):
            lines = data.draw(st.lists(st.integers(1, REQUESTS), min_size=1, max_size=REQUESTS, unique=True))
            mode = data.draw(st.sampled_from([ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY]))
            count = {ForwardMode.DECODE: st.just(1), ForwardMode.TARGET_VERIFY: st.just(2)}.get(
                mode, st.integers(1, 2 * TOP_K)
            )
            world.step(mode, {line: data.draw(count) for line in lines}, captured=not mode.is_extend())


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
@pytest.mark.parametrize("page", [1, 64])
def test_the_host_waits_for_nothing(mode: ForwardMode, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = IndexerShape(INDEX_HEADS, INDEX_SIZE, INDEX_ROPE, TOP_K, False)
    budget = shape.workspace(1 << 16)
    monkeypatch.setattr(lightning_indexer, "_signs", lightning_indexer._signs.__wrapped__)  # keep no fake tensor
    with host_waits() as found:
        each = 3 if mode.is_target_verify() else 1
        rows = 2 * each if not mode.is_extend() or mode.is_target_verify() else 40

        def there(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=GPU)

        tables = Tables(there(5, 400, dtype=torch.int32), page, TOP_K, budget)
        batch: Any = SimpleNamespace(
            forward_mode=mode, batch_size=2, input_ids=there(rows), positions=there(rows), req_pool_indices=there(2),
            seq_lens=there(2), seq_lens_cpu=SimpleNamespace(tolist=lambda: [130, 55]), out_cache_loc=there(rows),
            extend_seq_lens=there(2, dtype=torch.int32), extend_seq_lens_cpu=[30, 10],
            spec_info=SimpleNamespace(draft_token_num=each),
        )  # fmt: skip
        prefill = mode.is_extend() and not mode.is_target_verify()
        step = tables.eager(batch) if prefill else tables.captured(batch)
        assert step is not None
        selection = step.selection
        assert selection is not None and selection.rows == rows
        angle = there(rows, INDEX_ROPE // 2, dtype=torch.float32)
        select(
            there(rows, INDEX_HEADS, INDEX_SIZE, dtype=torch.bfloat16), there(rows, INDEX_HEADS, dtype=torch.float32),
            angle, angle, there(9, page, INDEX_SIZE + 4, dtype=torch.uint8), selection, shape, budget,
            there(rows, TOP_K, dtype=torch.int32),
        )  # fmt: skip
    assert not found


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs take a GPU")
def test_a_graph_is_replayed_with_other_lengths_and_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a_pool("plain", 64, monkeypatch))
    world.step(ForwardMode.EXTEND, {1: 70, 2: TOP_K + 1, 3: 2})
    static, x = world.batch(ForwardMode.DECODE, {1: 1, 2: 1})
    world.run(static, x, captured=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen, out = world.run(static, x, captured=True)
    for lines in ((1, 2), (3, 1), (2, 3)):
        batch, new = world.batch(ForwardMode.DECODE, dict.fromkeys(lines, 1))
        for name in ("positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(batch, name))
        x.copy_(new)
        graph.replay()
        world.check(dict.fromkeys(lines, 1), chosen, out)
