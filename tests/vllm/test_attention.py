"""Attention on this package's kernels: vLLM's interface apart, and in real engines against the oracle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from atom_patches.vllm.adapters.paged_attention import AtomPagedBackend, AtomPagedBuilder, AtomPagedImpl  # noqa: E402
from tests.vllm.gdn_oracle import free_port, oracle, prompt  # noqa: E402
from tests.vllm.pcp_engines import Engine, Request, check_greedy, engine, launch, request, single  # noqa: E402

HEADS, KV_HEADS, SIZE = 4, 2, 16

# The interface


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Requests with what they have and what they add, in blocks that are dealt out in any order."""
    requests = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4))
    block = draw(st.sampled_from([1, 3, 16]))
    return {
        "requests": requests,
        "block": block,
        "window": draw(st.sampled_from([None, 1, 7])),
        "soft_cap": draw(st.sampled_from([None, 2.0])),
        "padding": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_step_is_stored_and_attended_to(step: dict[str, Any]) -> None:
    torch.manual_seed(step["seed"])
    block, requests, padding = step["block"], step["requests"], step["padding"]
    lengths = [have + adds for have, adds in requests]
    table, count = dealt(lengths, block)
    cache = torch.full(AtomPagedBackend.get_kv_cache_shape(count, block, KV_HEADS, SIZE), float("nan"))
    every = [torch.randn(2, length, KV_HEADS, SIZE) for length in lengths]
    impl = AtomPagedImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, step["window"], "auto", step["soft_cap"])

    def store(index: int, start: int, stop: int) -> tuple[Any, Any]:
        positions = torch.arange(start, stop)
        return every[index][:, start:stop], table[index][positions // block] * block + positions % block

    for index, (have, _) in enumerate(requests):
        (keys, values), slots = store(index, 0, have)
        impl.do_kv_cache_update(torch.nn.Module(), keys, values, cache, slots)
    own = [store(index, have, have + adds) for index, (have, adds) in enumerate(requests)]
    pad = torch.full((2, padding, KV_HEADS, SIZE), float("nan"))
    rows = torch.cat([*(new for new, _ in own), pad], 1)
    slots = torch.cat([*(at for _, at in own), torch.full((padding,), -1)])
    impl.do_kv_cache_update(torch.nn.Module(), rows[0], rows[1], cache, slots)

    query = torch.randn(rows.shape[1], HEADS, SIZE)
    got = torch.full_like(query, 7.0)
    impl.forward(None, query, rows[0], rows[1], cache, built(requests, table, slots[: len(slots) - padding]), got)
    assert (got[len(got) - padding :] == 7).all(), "padding is nobody's"
    start = 0
    for index, (have, adds) in enumerate(requests):
        expected = plain(query[start : start + adds], every[index], have, impl)
        torch.testing.assert_close(got[start : start + adds], expected, rtol=1e-5, atol=1e-5)
        start += adds


def dealt(lengths: list[int], block: int) -> tuple[Any, int]:
    """A block table whose entries behind a request's end name nothing, and how many blocks there are."""
    needed = [-(-length // block) for length in lengths]
    blocks = torch.randperm(sum(needed))
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int64)
    for index, (count, taken) in enumerate(zip(needed, blocks.split(needed), strict=True)):
        table[index, :count] = taken
    return table, sum(needed)


def built(requests: list[tuple[int, int]], table: Any, slots: Any) -> Any:
    """The step as vLLM's runner describes it, by our builder."""
    adds = torch.tensor([adds for _, adds in requests])
    lengths = torch.tensor([have + adds for have, adds in requests], dtype=torch.int32)
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    common: Any = SimpleNamespace(
        num_actual_tokens=int(adds.sum()),
        query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int64), adds.cumsum(0)]).int(),
        seq_lens=lengths,
        block_table_tensor=table.int(),
        slot_mapping=slots,
        max_query_len=int(adds.max()),
        max_seq_len=int(lengths.max()),
        causal=True,
    )
    return AtomPagedBuilder(None, [], config, torch.device("cpu")).build(0, common)


def plain(query: Any, stored: Any, have: int, impl: AtomPagedImpl) -> Any:
    """Attention of the last rows of one request, written out."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in stored)
    scores = query.transpose(0, 1) @ keys.mT * impl.scale
    if impl.soft_cap:
        scores = impl.soft_cap * torch.tanh(scores / impl.soft_cap)
    distance = torch.arange(have, have + len(query))[:, None] - torch.arange(keys.shape[1])
    hidden = (distance < 0) | (distance >= (impl.window or 10**6))
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1)


PLAIN = {
    "dtype": torch.bfloat16, "attn_type": None, "use_mla": False, "has_sink": False, "use_sparse": False,
    "use_mm_prefix": False, "use_per_head_quant_scales": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "served"),
    [
        ({}, True),
        ({"attn_type": "decoder"}, True),
        ({"attn_type": "encoder_only"}, False),
        ({"attn_type": "encoder_decoder"}, False),
        ({"dtype": torch.float64}, False),
        *(({name: True}, False) for name, value in PLAIN.items() if value is False),
    ],
)
def test_other_layers_are_left_to_vllm(other: dict[str, Any], served: bool) -> None:
    assert AtomPagedBackend.serves({**PLAIN, **other}) is served


def test_a_graph_s_work_is_cut_for_the_longest_request() -> None:
    requests, table = [(3, 1)], torch.zeros(1, 4, dtype=torch.int64)
    step = built(requests, table, torch.tensor([3]))
    common: Any = SimpleNamespace(**{**vars(step), "block_table_tensor": table})
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    captured = AtomPagedBuilder(None, [], config, torch.device("cpu")).build_for_cudagraph_capture(common)
    assert (step.max_seq_len, captured.max_seq_len) == (4, 512)


# Real engines

LONG = prompt(150, seed=2)
PROMPTS = [prompt(n, seed=1) for n in (1, 5, 37, 129)]
CHUNKED: dict[str, Any] = {
    "max_model_len": 256, "max_num_batched_tokens": 96, "enable_prefix_caching": True, "block_size": 32,
}  # fmt: skip
ON = {"ATOM_ATTENTION": "1"}
MODELS = ["qwen3_tied", "llama_bias", "qwen3_next"]
#: ATOM decoders whose own kernel writes keys and values: gates and norms; neither; positions in three dimensions.
WRITTEN = {"with an ATOM decoder": "qwen3_next", "without norms": "llama_bias", "in three dimensions": "qwen3_5_moe"}
#: Attention to latents, on vLLM's decoder and on ATOM's; with DeepSeek's positions and with plain ones.
LATENTS: dict[str, tuple[str, dict[str, str]]] = {
    "latents": ("deepseek_v3_groups", {}),
    "latents with an ATOM decoder": ("deepseek_v3_groups", {"ATOM_MODELS": "1"}),
    "latents and plain positions": ("deepseek_v3_plain", {}),
}
CUT: dict[str, Any] = {"setup": "tests.vllm.latent_probe", "scheduler_cls": "tests.vllm.latent_probe.ChunkedScheduler"}


def conversation(name: str) -> list[list[Request]]:
    """Chunks beside decodes, one of them scored; then the longest goes on, from cached blocks."""
    first = [*(request(tokens) for tokens in PROMPTS), request(LONG), request(prompt(37, seed=1), prompt_logprobs=2)]
    grown = LONG + tuple(oracle(name).answer(LONG, 10)[0]) + prompt(11, seed=5)
    return [first, [request(grown)]]


def attending(name: str, waves: list[list[Request]] | None = None, **more: Any) -> Engine:
    options = {"setup": "tests.vllm.attention_probe", "distributed_executor_backend": "uni", **CHUNKED, **more}
    return engine(name, waves or conversation(name), **options)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plans = {name: attending(name, env=ON) for name in MODELS}
    plans |= {key: attending(name, env={**ON, "ATOM_MODELS": "1"}) for key, name in WRITTEN.items()}
    short = [[request(PROMPTS[2])]]
    apart = {**ON, "ATOM_MODELS": "1", "ATOM_FUSIONS": "experts,qk_rope"}
    plans["written apart"] = attending("qwen3_next", short, env=apart)
    plans["not asked for"] = attending("qwen3_tied", short)
    plans["switched off"] = attending("qwen3_tied", short, env={**ON, "ATOM_PATCH_VLLM_ATTENTION": "0"})
    plans |= {key: attending(name, env={**ON, **more}, **CUT) for key, (name, more) in LATENTS.items()}
    return single(tmp_path_factory.mktemp("attention"), plans)


@pytest.mark.parametrize("key", [*MODELS, *WRITTEN])
def test_every_answer_is_the_oracle_s(engines: dict[str, Any], key: str) -> None:
    name, result = WRITTEN.get(key, key), engines[key]
    for sent, got in zip(conversation(name), result["waves"], strict=True):
        assert check_greedy(name, sent, got) == len(sent)
    assert result["waves"][1][0]["cached"] >= 32, "the conversation goes on from cached blocks"
    assert "vllm" not in result["report"], "vLLM's own backend attended"
    assert ("writes" in result["report"]) == (key in MODELS), "one kernel is to rotate and to write"
    assert result["patches"]["vllm.attention.get_attn_backend"] == "applied"


@pytest.mark.parametrize("key", LATENTS)
def test_every_answer_to_latents_is_the_oracle_s(engines: dict[str, Any], key: str) -> None:
    (name, more), result = LATENTS[key], engines[key]
    for sent, got in zip(conversation(name), result["waves"], strict=True):
        assert check_greedy(name, sent, got) == len(sent)
    assert result["waves"][1][0]["cached"] >= 32, "the conversation goes on from cached blocks"
    ran = result["report"]
    assert ran["prefills"] and ran["few rows"], "this package's backend attended in both ways"
    assert ran["most pieces"] > 2 and ran["few rows of several"] and ran["beside prefills"], ran
    patches = {id for id, state in result["patches"].items() if state == "applied"}
    assert patches >= {"vllm.attention.get_attn_backend", "vllm.cpu.mla_process_weights", "vllm.cpu.rotary_embedding"}
    assert ("vllm.models.initialize_model" in patches) == bool(more), "the decoder is the one that was asked for"


def test_patches_for_latents_leave_other_models_alone(engines: dict[str, Any]) -> None:
    for key, result in engines.items():
        states = {result["patches"][f"vllm.cpu.{name}"] for name in ("mla_process_weights", "rotary_embedding")}
        assert states == {"applied" if key in LATENTS else "inactive"}, key


def test_the_write_to_the_cache_can_be_switched_off(engines: dict[str, Any]) -> None:
    result = engines["written apart"]
    assert set(result["report"]) == {"atom_patches", "writes"}
    assert check_greedy("qwen3_next", [request(PROMPTS[2])], result["waves"][0]) == 1


@pytest.mark.parametrize("key", ["not asked for", "switched off"])
def test_vllm_s_own_backend_attends_where_ours_is_not_asked_for(engines: dict[str, Any], key: str) -> None:
    result = engines[key]
    assert set(result["report"]) == {"vllm"}
    assert check_greedy("qwen3_tied", [request(PROMPTS[2])], result["waves"][0]) == 1


@pytest.mark.long
def test_every_answer_of_two_ranks_is_the_oracle_s(tmp_path: Path) -> None:
    waves = conversation("qwen3_next")[:1]
    split = {"prefill_context_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    plans = {
        "heads": attending("qwen3_next", waves, env=ON, tensor_parallel_size=2, port=free_port()),
        "rows": attending("qwen3_next", waves, env=ON, **split),
    }
    results = launch(tmp_path, 2, plans)
    for rank in results["heads"]:
        assert check_greedy("qwen3_next", waves[0], rank["waves"][0]) == len(waves[0])
        assert set(rank["report"]) == {"atom_patches", "writes"}
    for rank in results["rows"]:  # prefill context parallelism has vLLM's backends
        assert check_greedy("qwen3_next", waves[0], rank["waves"][0]) == len(waves[0])
        assert set(rank["report"]) == {"vllm"}
