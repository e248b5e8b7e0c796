"""Attention to latents through vLLM's interface: steps of any shape, with pieces shorter than what is cached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

from atom_patches.runtime.latent_pieces import PAGE  # noqa: E402
from atom_patches.vllm.adapters import latent_attention  # noqa: E402
from atom_patches.vllm.adapters.latent_attention import (  # noqa: E402
    AtomLatentBackend,
    AtomLatentBuilder,
    AtomLatentImpl,
    AtomLatentMetadata,
    most_absorbed,
    room_of_a_piece,
)
from tests.vllm.test_attention import PLAIN, dealt  # noqa: E402

HEADS, LATENT, ROPE, KEY, VALUE = 3, 8, 4, 6, 5
DEEPSEEK = SimpleNamespace(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
TINY = SimpleNamespace(
    q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=KEY, qk_rope_head_dim=ROPE, v_head_dim=VALUE
)
Requests = list[tuple[int, int]]


def engine(sizes: Any = TINY, **more: Any) -> Any:
    """A configuration as vLLM makes it, for what the builder reads."""
    numbers: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "heads": HEADS}
    numbers |= more
    model = SimpleNamespace(
        hf_text_config=sizes, max_model_len=numbers["max_model_len"], get_num_attention_heads=lambda _: numbers["heads"]
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(**numbers),
        cache_config=SimpleNamespace(block_size=16),
        speculative_config=None,
    )


def builder(block: int, room: int, few: int, device: str = "cpu") -> AtomLatentBuilder:
    made = AtomLatentBuilder(SimpleNamespace(block_size=block), [], engine(), torch.device(device))
    made.room, made.few = room, few
    return made


class Layer:
    """What vLLM's layer does around a backend: the way into the space of the latents and out of it."""

    def __init__(self, sizes: Any = TINY, heads: int = HEADS, dtype: Any = torch.float32, device: str = "cpu") -> None:
        self.latent, self.rope, self.key, self.value = (
            sizes.kv_lora_rank, sizes.qk_rope_head_dim, sizes.qk_nope_head_dim, sizes.v_head_dim,
        )  # fmt: skip
        self.heads, self.dtype, self.device = heads, dtype, device
        self.weight = self.random(heads * (self.key + self.value), self.latent) / self.latent**0.5
        self.impl = AtomLatentImpl(
            heads, self.latent + self.rope, (self.key + self.rope) ** -0.5, 1, None, None, "auto", None, "decoder",
            None, q_lora_rank=None, kv_lora_rank=self.latent, qk_nope_head_dim=self.key, qk_rope_head_dim=self.rope,
            qk_head_dim=self.key + self.rope, v_head_dim=self.value, kv_b_proj=lambda x: (x @ self.weight.T, None),
        )  # fmt: skip

    def random(self, *shape: int) -> Any:
        """Values of the layer's dtype, the same on every device."""
        return torch.randn(shape).to(self.dtype).to(self.device)

    def forward(self, q: Any, cache: Any, step: AtomLatentMetadata) -> Any:
        """From queries `[rows, heads, size]` to `[rows, heads, value]`."""
        output = torch.full((len(q), self.heads * self.value), 7.0, dtype=self.dtype, device=q.device)
        few = step.num_decode_tokens
        if step.num_prefills:
            rows = slice(few, step.num_actual_tokens)
            self.impl.forward_mha(q[rows], None, None, cache, step, None, output[rows])  # type: ignore[arg-type]
        if few:
            of_keys, of_values = self._parts(self.weight)
            plain, turned = q[:few].split([self.key, self.rope], dim=2)
            absorbed = torch.einsum("thk,hkl->thl", plain, of_keys)
            found, _ = self.impl.forward_mqa((absorbed, turned), cache, step, self)
            output[:few] = torch.einsum("thl,hvl->thv", found, of_values).flatten(1)
        return output.view(-1, self.heads, self.value)

    def plain(self, q: Any, cached: Any) -> Any:
        """Attention of the last rows of one request, written out in float32."""
        latents, turned = cached.float().split([self.latent, self.rope], dim=1)
        of_keys, of_values = self._parts(self.weight.float())
        keys, values = torch.einsum("tl,hkl->htk", latents, of_keys), torch.einsum("tl,hvl->htv", latents, of_values)
        keys = torch.cat([keys, turned.expand(self.heads, -1, -1)], dim=2)
        scores = q.float().transpose(0, 1) @ keys.mT * self.impl.scale
        place = torch.arange(len(cached), device=q.device)
        hidden = place > place[-len(q) :, None]
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)

    def _parts(self, weight: Any) -> Any:
        return weight.view(self.heads, self.key + self.value, self.latent).split([self.key, self.value], dim=1)


def common(requests: Requests, table: Any, slots: Any) -> CommonAttentionMetadata:
    """The step as vLLM's runner describes it."""
    adds = torch.tensor([adds for _, adds in requests])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), adds.cumsum(0)]).int()
    lengths = torch.tensor([have + adds for have, adds in requests], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(table.device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(table.device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(requests),
        num_actual_tokens=int(adds.sum()),
        max_query_len=int(adds.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table.int(),
        slot_mapping=slots,
    )


def run(
    requests: Requests, block: int, room: int, few: int, padding: int = 0, layer: Layer | None = None,
    within: float = 1e-5,
) -> AtomLatentMetadata:  # fmt: skip
    """One step by the backend and written out; the cache has NaN wherever nobody put anything."""
    layer = layer or Layer()
    lengths = [have + adds for have, adds in requests]
    table, count = dealt(lengths, block)
    table = table.to(layer.device)
    size = layer.latent + layer.rope
    shape = AtomLatentBackend.get_kv_cache_shape(count + 1, block, 1, size)
    cache = torch.full(shape, float("nan"), dtype=layer.dtype, device=layer.device)
    cached = [layer.random(length, size) for length in lengths]

    def store(first: Any, last: Any, more: int) -> Any:
        """Tokens of each request from one position to another, and rows of padding."""
        rows, slots = [torch.full_like(cache[0, :1].expand(more, -1), float("nan"))], [table.new_full((more,), -1)]
        for index, of_one in enumerate(cached):
            at = torch.arange(first[index], last[index], device=layer.device)
            rows.insert(-1, of_one[at])
            slots.insert(-1, table[index][at // block] * block + at % block)
        stored, to = torch.cat(rows), torch.cat(slots)
        latents, turned = stored.split([layer.latent, layer.rope], dim=1)
        layer.impl.do_kv_cache_update(latents, turned[:, None], cache, to, "auto", torch.ones(1))
        return to

    have = [have for have, _ in requests]
    store([0] * len(requests), have, 0)
    slots = store(have, lengths, padding)
    q = layer.random(len(slots), layer.heads, layer.key + layer.rope)
    given = common(requests, table, slots[: len(slots) - padding])
    step = builder(block, room, few, layer.device).build(0, given)
    got = layer.forward(q, cache, step)
    assert (got[len(got) - padding :] == 7).all(), "padding is nobody's"
    start = 0
    for (_, adds), of_one in zip(requests, cached, strict=True):
        expected = layer.plain(q[start : start + adds], of_one)
        torch.testing.assert_close(got[start : start + adds].float(), expected, rtol=within, atol=within)
        start += adds
    return step


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Requests in vLLM's order: those with few new tokens and something cached in front, fresh ones last."""
    few = draw(st.integers(1, 4))
    in_front = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, few)), max_size=3))
    chunks = draw(st.lists(st.tuples(st.integers(1, 200), st.integers(few + 1, 70)), max_size=3))
    fresh = draw(st.lists(st.tuples(st.just(0), st.integers(1, 70)), max_size=3))
    requests = [*sorted(in_front, key=lambda one: one[1] > 1), *chunks, *fresh]
    return {
        "requests": requests or [(5, 1)],
        "few": few,
        "block": draw(st.sampled_from([1, 3, 16])),
        "room": PAGE * draw(st.integers(1, 6)),
        "padding": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=80, deadline=None)
@given(steps())
def test_a_step_is_stored_and_attended_to(step: dict[str, Any]) -> None:
    torch.manual_seed(step["seed"])
    run(step["requests"], step["block"], step["room"], step["few"], step["padding"])


def test_what_is_cached_comes_in_pieces_and_of_many_requests_together() -> None:
    torch.manual_seed(0)
    step = run([(9, 1), (100, 5), (0, 4), (30, 20), (0, 7)], block=16, room=64, few=1)
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (1, 1, 4)
    assert [(piece.causal, len(piece.slots)) for piece in step.pieces] == [
        (True, 64), (True, 16), (False, 64), (False, 48), (False, 32),
    ]  # fmt: skip
    assert [(piece.rows.start, piece.rows.stop) for piece in step.pieces] == [
        (0, 29), (29, 36), (0, 5), (0, 5), (9, 29),
    ]  # fmt: skip


def test_requests_without_a_past_stand_between_others_without_a_piece_of_their_own() -> None:
    torch.manual_seed(1)
    step = run([(0, 4), (20, 5), (0, 4), (20, 6), (0, 7)], block=16, room=128, few=1)
    assert [(piece.causal, piece.rows.start, piece.rows.stop) for piece in step.pieces] == [
        (True, 0, 26), (False, 4, 19),
    ]  # fmt: skip


def test_a_chunk_that_is_longer_than_a_piece_sees_all_of_itself() -> None:
    torch.manual_seed(2)
    step = run([(3, 1), (10, 50), (0, 40)], block=16, room=PAGE, few=1)
    assert max(len(piece.slots) for piece in step.pieces) == PAGE


def test_few_rows_ask_in_the_space_of_the_latents_and_single_ones_apart() -> None:
    torch.manual_seed(3)
    step = run([(5, 1), (9, 1), (30, 3), (30, 1), (8, 4), (9, 30)], block=16, room=64, few=4)
    assert [(some.rows, some.most_rows) for some in step.decode] == [(slice(0, 2), 1), (slice(2, 10), 4)]
    assert (step.num_decodes, step.num_prefills) == (5, 1)


def test_how_few_rows_follows_from_the_sizes() -> None:
    config = engine(DEEPSEEK, max_model_len=32768, max_num_seqs=16, max_num_batched_tokens=2048, heads=16)
    few = most_absorbed(config, DEEPSEEK)  # type: ignore[arg-type]
    assert few == 85

    def products(rows: int, tokens: int) -> tuple[int, int]:
        """Of one head, in the space of the latents and with keys and values made of them."""
        absorbed = rows * tokens * (2 * 512 + 64) + rows * 512 * 256
        return absorbed, tokens * 512 * 256 + rows * tokens * (128 + 64 + 128)

    for tokens in (171, 1000, 100_000):
        absorbed, made = products(few, tokens)
        assert absorbed < made
    absorbed, made = products(2 * few + 1, 10**9)
    assert absorbed > made


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("step", [2048, 8192])
def test_a_piece_has_room_in_what_vllm_s_layer_measures(heads: int, step: int) -> None:
    config = engine(DEEPSEEK, max_model_len=32768, max_num_seqs=256, max_num_batched_tokens=step, heads=heads)
    room = room_of_a_piece(config, DEEPSEEK)  # type: ignore[arg-type]
    used = room * (heads * (256 + 192) + 576) + 3 * step * heads * 128
    measured = 65536 * heads * 256
    assert used <= measured < used + PAGE * (heads * (256 + 192) + 576)
    assert room > step and room % PAGE == 0


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("requests", "step"), [(256, 16_384), (128, 8_192), (16, 32_768), (1024, 16_384)])
def test_absorbed_rows_fit_into_what_vllm_s_layer_measures(heads: int, requests: int, step: int) -> None:
    config = engine(DEEPSEEK, max_model_len=8192, max_num_seqs=requests, max_num_batched_tokens=step, heads=heads)
    few = most_absorbed(config, DEEPSEEK)  # type: ignore[arg-type]
    measured = max(65536, requests * 16) * heads * 256
    assert 1 <= few <= 85
    assert min(step, few * requests) * heads * (3 * 512 + 64) <= measured


def test_a_piece_has_some_room_where_vllm_measures_little() -> None:
    config = engine(DEEPSEEK, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=8192)
    assert room_of_a_piece(config, DEEPSEEK) == latent_attention.LEAST_ROOM  # type: ignore[arg-type]


def test_a_graph_s_work_is_cut_for_the_longest_request_and_reads_where_vllm_writes() -> None:
    table = torch.zeros(2, 4, dtype=torch.int32)
    given = common([(3, 1), (2, 1)], table, torch.tensor([3, 19]))
    made = builder(16, 64, 4)
    [usual], [captured] = made.build(0, given).decode, made.build_for_cudagraph_capture(given).decode
    assert (usual.most_rows, usual.most_keys) == (1, 4)
    assert (captured.most_rows, captured.most_keys) == (1, 512)
    for ours, theirs in (
        (captured.starts, given.query_start_loc),
        (captured.lengths, given.seq_lens),
        (captured.blocks, given.block_table_tensor),
    ):
        assert ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape


def test_the_host_waits_for_nothing() -> None:
    """Tensors of the device have no values here, and whoever asks for one is refused."""
    requests = [(5, 1), (40, 3), (200, 30), (0, 50)]
    rows = sum(adds for _, adds in requests)
    given = common(requests, torch.zeros(4, 16, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64))
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(given, name, getattr(given, name).to("meta"))
    step = builder(16, 64, 4).build(0, given)
    layer = Layer()
    layer.weight = layer.weight.to("meta")
    cache = torch.empty(64, 16, LATENT + ROPE, device="meta")
    stored = torch.empty(rows, LATENT + ROPE, device="meta")
    layer.impl.do_kv_cache_update(
        stored[:, :LATENT], stored[:, None, LATENT:], cache, given.slot_mapping, "auto", torch.ones(1)
    )
    q = torch.empty(rows, HEADS, KEY + ROPE, device="meta")
    assert step.num_decodes and len([piece for piece in step.pieces if not piece.causal]) > 2
    assert layer.forward(q, cache, step).shape == (rows, HEADS, VALUE)


def test_nothing_is_stored_while_memory_is_measured() -> None:
    layer, rows = Layer(), torch.randn(2, LATENT)
    layer.impl.do_kv_cache_update(rows, rows[:, None, :ROPE], torch.tensor([]), torch.tensor([0, 1]), "auto", rows)
    cache = torch.zeros(1, 2, LATENT + ROPE)
    layer.impl.do_kv_cache_update(rows, rows[:, None, :ROPE], cache, None, "auto", rows)
    assert not cache.any()


@pytest.mark.parametrize(
    ("other", "served"),
    [
        ({}, True),
        ({"dtype": torch.float64}, False),
        ({"attn_type": "encoder_only"}, False),
        *(({name: True}, False) for name in ("has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales")),
        ({"use_mla": False}, False),
    ],
)
def test_other_layers_are_left_to_others(other: dict[str, Any], served: bool) -> None:
    assert AtomLatentBackend.serves({**PLAIN, "use_mla": True, **other}) is served


def test_in_float32_it_is_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**PLAIN, "use_mla": True, "dtype": torch.float32}
    monkeypatch.setattr(latent_attention, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    assert AtomLatentBackend.serves(asked)
    monkeypatch.setattr(latent_attention, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert not AtomLatentBackend.serves(asked)
    assert AtomLatentBackend.serves({**asked, "dtype": torch.bfloat16})
