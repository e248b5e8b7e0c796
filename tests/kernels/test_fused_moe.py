"""Routing against independent formulas, experts against a formula in float64, every provider against the reference."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.fused_moe import (
    FUSED_MOE,
    MOE_ROUTING,
    ROUTING_TOLERANCE,
    TOLERANCE,
    bench,
    fused_moe,
    moe_routing,
    tuned,
)
from atom_patches.kernels.fused_moe.tuned import Config, Shape, Tile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUTERS = harness.providers(MOE_ROUTING)
PROVIDERS = harness.providers(FUSED_MOE)
SGLANG = registry._package(MOE_ROUTING, "engine") == "atom_patches.sglang.kernels"
GAIN = 0.02 * 512**0.5
"""Of a served model's down projections: weights of deviation 0.02, 512 wide. Engines round gate, up, silu(gate) and the
product one after the other: with a gain of 1, sums that cancel are off by more than the tolerance's absolute part."""
WIDTHS, HIDDEN = ([40, 64], [72, 128]) if harness.GPU else ([8, 16, 48], [16, 40, 64])
"""Sizes that tiles fit and do not fit; few on a GPU, where each is compiled. vLLM's kernels serve multiples of 64."""


# Routing


def apart(tokens: int, experts: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits whose order no rounding changes: every row holds the same values in another order."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator) for _ in range(tokens)]
    values = torch.linspace(-2, 2, experts)
    return torch.stack([values[row] for row in rows] or [values])[:tokens].to(harness.DEVICE, dtype)


def bias_of(experts: int, seed: int) -> Tensor:
    """Of a size and grain that no sum with a score comes near another one by chance."""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    return (order.float() * 0.0137).to(harness.DEVICE)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_routing_is_the_formula(scoring: str, renormalize: bool, biased: bool) -> None:
    logits = apart(5, 12, 0)
    bias = bias_of(12, 1) if biased else None
    weights, ids = moe_routing(logits, 3, scoring=scoring, renormalize=renormalize, bias=bias, scaling=2.5)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for token in range(5):
        wide = logits[token].double()
        scores = wide.exp() / wide.exp().sum() if scoring == "softmax" else 1 / (1 + (-wide).exp())
        choice = scores + (0 if bias is None else bias.double())
        best = sorted(range(12), key=lambda e: -float(choice[e]))[:3]
        assert ids[token].tolist() == best
        expected = scores[best] / (scores[best].sum() if renormalize else 1) * 2.5
        torch.testing.assert_close(weights[token].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("provider", ROUTERS)
@pytest.mark.parametrize("groups", [(1, 1, 8), (2, 1, 8), (3, 2, 6), (4, 3, 5), (8, 4, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_groups(provider: str, groups: tuple[int, int, int], biased: bool, scoring: str) -> None:
    count, kept, size = groups
    logits = apart(6, count * size, 3)
    bias = bias_of(count * size, 4) if biased else None
    arguments = (logits, min(4, kept * size), scoring, True, bias, count, kept, 1.5)
    skip_unserved(MOE_ROUTING, provider, arguments)
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])


def test_grouped_routing_is_deepseek_v3s() -> None:
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = importlib.import_module("transformers").DeepseekV3Config(
        n_routed_experts=32, num_experts_per_tok=4, hidden_size=32, n_group=8, topk_group=3, routed_scaling_factor=2.5
    )
    router = module.DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(32)
    router.e_score_correction_bias.copy_(bias_of(32, 5).cpu())
    logits = apart(40, 32, 6).cpu()
    _, expected, chosen = router(logits)
    bias = router.e_score_correction_bias
    got, ids = moe_routing(logits, 4, scoring="sigmoid", bias=bias, n_group=8, topk_group=3, scaling=2.5)
    assert torch.equal(ids.long().sort(-1).values, chosen.sort(-1).values)
    by_expert = torch.zeros(40, 32).scatter_(1, chosen, expected)
    torch.testing.assert_close(torch.zeros(40, 32).scatter_(1, ids.long(), got), by_expert)


def test_routing_is_qwen3_nexts() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = importlib.import_module("transformers").Qwen3NextConfig(
        num_experts=24, num_experts_per_tok=4, hidden_size=24, norm_topk_prob=True
    )
    router = module.Qwen3NextTopKRouter(config)
    router.weight.data = torch.eye(24)
    logits = apart(20, 24, 7).cpu()
    _, expected, chosen = router(logits)
    weights, ids = moe_routing(logits, 4)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("provider", ROUTERS)
@harness.examples(5)
@given(
    st.integers(0, 9), st.sampled_from([1, 2, 7, 8, 33, 256]), st.integers(1, 8), st.sampled_from(sorted(DTYPES)),
    st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_every_router(
    provider: str, tokens: int, experts: int, top_k: int, dtype: str, scoring: str, renormalize: bool, biased: bool,
    seed: int,
) -> None:  # fmt: skip
    logits = apart(tokens, experts, seed, DTYPES[dtype] if experts < 128 else torch.float32)
    bias = bias_of(experts, seed) if biased else None
    arguments = (logits, min(top_k, experts), scoring, renormalize, bias, 1, 1, 1.0)
    if registry_refuses(MOE_ROUTING, provider, arguments):
        return
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])


@pytest.mark.parametrize("provider", ROUTERS)
def test_of_equal_experts_the_first_is_taken(provider: str) -> None:
    logits = torch.zeros(3, 16, device=harness.DEVICE)
    logits[1, 9:] = 1.0
    logits[2, [3, 11]] = 1.0
    arguments = (logits, 4, "softmax", True, None, 1, 1, 1.0)
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])
    _, ids = moe_routing(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [9, 10, 11, 12], [3, 11, 0, 1]]


@pytest.mark.parametrize("provider", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_of_equal_groups_the_first_is_taken(provider: str, biased: bool) -> None:
    if provider == "engine" and SGLANG and biased:
        pytest.skip("SGLang's router counts two equal best scores of a group once")
    logits = torch.zeros(2, 12, device=harness.DEVICE)
    logits[1, 5] = logits[1, 10] = 1.0
    bias = torch.zeros(12, device=harness.DEVICE) if biased else None
    arguments = (logits, 4, "sigmoid", True, bias, 4, 2, 1.0)
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])
    _, ids = MOE_ROUTING.reference(*arguments)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 10, 3, 4]]


# The engines' routers do not promise it: see the docstrings of their bindings.
@pytest.mark.parametrize("provider", [name for name in ROUTERS if name != "engine"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_that_are_not_numbers_count_as_zero(provider: str, scoring: str) -> None:
    logits = apart(4, 16, 8)
    logits[0, 5] = float("nan")
    logits[1] = float("nan")
    logits[2, 3] = float("-inf")
    logits[3] = -500.0
    arguments = (logits, 4, scoring, True, None, 1, 1, 1.0)
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])
    weights, ids = moe_routing(logits, 4, scoring=scoring)
    assert weights.isfinite().all()
    assert all(len(set(row)) == 4 and set(row) <= set(range(16)) for row in ids.tolist())


@pytest.mark.parametrize("provider", ROUTERS)
def test_routing_of_columns_of_a_wider_tensor(provider: str) -> None:
    logits = torch.cat([apart(5, 32, 9), apart(5, 32, 10)], 1)[:, 1::2]
    arguments = (logits, 3, "sigmoid", True, bias_of(64, 11)[::2], 1, 1, 1.0)
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])


@pytest.mark.parametrize("provider", [name for name in ROUTERS if name == "triton"])
def test_several_tokens_a_program(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("atom_patches.kernels.fused_moe.triton_impl"), "ONE_A_PROGRAM", 16)
    arguments = (apart(27, 8, 12), 2, "softmax", True, None, 1, 1, 1.0)
    harness.check(MOE_ROUTING, provider, arguments, tolerance=ROUTING_TOLERANCE["float32"])


def test_routing_as_torch_sees_it() -> None:
    harness.opcheck(MOE_ROUTING, (apart(3, 8, 0), 2, "sigmoid", True, bias_of(8, 1), 4, 2, 2.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scoring": "relu"}, "scoring must be one of softmax, sigmoid"),
        ({"n_group": 3}, "1 of 3 groups cannot be taken of 8 experts"),
        ({"n_group": 4, "topk_group": 1}, "3 experts cannot be chosen among 2"),
        ({"n_group": 8, "topk_group": 8, "bias": torch.zeros(8)}, "no two best scores"),
        ({"bias": torch.zeros(7)}, r"bias must be \[8\], got \[7\]"),
    ],
)
def test_routing_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_routing(torch.zeros(2, 8), 3, **arguments)


# Experts


def registry_refuses(operation: Any, provider: str, arguments: tuple[Any, ...]) -> bool:
    return not registry.supports(operation, provider, arguments).ok


def skip_unserved(operation: Any, provider: str, arguments: tuple[Any, ...]) -> None:
    if registry_refuses(operation, provider, arguments):
        pytest.skip(f"{provider} does not serve this")


def draw(
    tokens: int,
    experts: int = 6,
    top_k: int = 2,
    width: int = 16,
    hidden: int = 32,
    dtype: str = "float32",
    *,
    shared: int = 0,
    gated: bool = False,
    ranks: int = 1,
    skew: bool = False,
    padded: int = 0,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments of FUSED_MOE: with `ranks` > 1 the experts of the first of them, with global ids."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(harness.DEVICE, DTYPES[dtype])

    everyone = experts * ranks
    chosen = torch.rand(tokens, everyone, generator=generator).argsort(-1)[:, :top_k].int()
    if skew:
        chosen = torch.arange(top_k, dtype=torch.int32).expand(tokens, top_k).clone()
    if padded:
        chosen[tokens - padded :] = -1
    weights = torch.rand(tokens, top_k, generator=generator) / top_k
    where = None
    if ranks > 1:
        where = torch.full((everyone,), -1, dtype=torch.int32)
        where[torch.randperm(everyone, generator=generator)[:experts]] = torch.arange(experts, dtype=torch.int32)
    return (
        normal(tokens, hidden), normal(experts, 2 * width, hidden, scale=hidden**-0.5),
        normal(experts, hidden, width, scale=2 * GAIN * width**-0.5),
        weights.to(harness.DEVICE), chosen.to(harness.DEVICE),
        None if where is None else where.to(harness.DEVICE),
        normal(2 * width * shared, hidden, scale=hidden**-0.5) if shared else None,
        normal(hidden, width * shared, scale=GAIN * (width * shared) ** -0.5) if shared else None,
        normal(hidden, scale=hidden**-0.5) if gated else None,
    )  # fmt: skip


def served(provider: str) -> tuple[str, int, int]:
    """A dtype, an expert's width and a hidden size that the provider serves: the strictest, the smallest."""
    return ("bfloat16", 64, 128) if provider == "engine" else ("float32", 16, 32)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_the_reference_is_the_formula(ranks: int, gated: bool) -> None:
    arguments = draw(5, ranks=ranks, shared=2, gated=gated, padded=1)
    x, w13, w2, weights, ids, where, shared_w13, shared_w2, gate = arguments
    found = fused_moe(
        x, w13, w2, weights, ids, expert_map=where, shared_w13=shared_w13, shared_w2=shared_w2, shared_gate=gate
    )

    def expert(row: Tensor, up: Tensor, down: Tensor) -> Tensor:
        first = up.double() @ row.double()
        half = first.numel() // 2
        return down.double() @ (first[:half] / (1 + (-first[:half]).exp()) * first[half:])

    for token in range(5):
        total = expert(x[token], shared_w13, shared_w2)
        if gate is not None:
            total = total / (1 + (-(x[token].double() @ gate.double())).exp())
        for j in range(2):
            number = int(ids[token, j])
            local = number if where is None or number < 0 else int(where[number])
            if local >= 0:
                total += float(weights[token, j]) * expert(x[token], w13[local], w2[local])
        torch.testing.assert_close(found[token].double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(4)
@given(
    st.sampled_from([0, 1, 2, 5, 17, 24]), st.sampled_from([1, 3, 8, 20]), st.sampled_from([2, 3]),
    st.sampled_from(WIDTHS), st.sampled_from(HIDDEN), st.sampled_from([0, 2]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_every_provider(
    provider: str, dtype: str, tokens: int, experts: int, top_k: int, width: int, hidden: int, shared: int, gated: bool,
    seed: int,
) -> None:  # fmt: skip
    arguments = draw(
        tokens, experts, min(top_k, experts), width, hidden, dtype, shared=shared, gated=gated and shared > 0, seed=seed
    )
    if registry_refuses(FUSED_MOE, provider, arguments):
        return
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("tokens", [1, 3, 21])
def test_experts_of_one_rank(provider: str, tokens: int) -> None:
    dtype, width, hidden = served(provider)
    arguments = draw(tokens, 4, 3, width, hidden, dtype, ranks=3, shared=1, seed=1)
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("tokens", [7, 37])
def test_all_tokens_on_the_same_experts(provider: str, tokens: int) -> None:
    dtype, width, hidden = served(provider)
    arguments = draw(tokens, 6, 2, width, hidden, dtype, skew=True, shared=1, seed=2)
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_wide_shared_expert(provider: str) -> None:
    dtype, width, hidden = served(provider)
    arguments = draw(19, 6, 2, width, hidden, dtype, shared=3, gated=True, seed=9)
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("tokens", [4, 40])
def test_padding(provider: str, shared: int, tokens: int) -> None:
    dtype, width, hidden = served(provider)
    arguments = draw(tokens, width=width, hidden=hidden, dtype=dtype, padded=tokens - 3, shared=shared, seed=3)
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])
    if not shared:
        assert not FUSED_MOE.reference(*arguments)[3:].any()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_rank_that_no_token_chose(provider: str) -> None:
    dtype, width, hidden = served(provider)
    x, w13, w2, weights, ids, _, *shared = draw(5, 6, width=width, hidden=hidden, dtype=dtype, seed=4)
    nowhere = torch.full((6,), -1, dtype=torch.int32, device=harness.DEVICE)
    arguments = (x, w13, w2, weights, ids, nowhere, *shared)
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("wide", [False, True])
def test_views_and_wide_ids(provider: str, wide: bool) -> None:
    """With `wide`, ids of 64 bits, and weights whose rows are innermost in memory, which the engines refuse."""
    dtype, width, hidden = served(provider)
    x, w13, w2, weights, ids, _, *_ = draw(9, hidden=2 * hidden, width=width, dtype=dtype, seed=5)
    if wide:
        w2, ids = w2.mT.contiguous().mT, ids.long()
    arguments = (
        x[:, ::2], w13[:, :, 1 : 1 + hidden], w2[:, :hidden], torch.stack([weights, weights], -1)[..., 0],
        torch.stack([ids, ids], -1)[..., 1], None, w13[0, :, 3 : 3 + hidden], w2[0, :hidden], w13[1, 0, ::2],
    )  # fmt: skip
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_unchosen_experts_weights_are_not_read(provider: str) -> None:
    dtype, width, hidden = served(provider)
    x, w13, w2, weights, ids, *_ = draw(6, width=width, hidden=hidden, dtype=dtype, seed=6)
    ids[ids == 4] = 5
    w13[4], w2[4] = float("nan"), float("nan")
    arguments = (x, w13, w2, weights, ids, None, None, None, None)
    harness.check(FUSED_MOE, provider, arguments, tolerance=TOLERANCE[dtype])


def test_as_torch_sees_it() -> None:
    harness.opcheck(FUSED_MOE, draw(3, ranks=2, shared=1, gated=True))


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    x, w13, w2, weights, ids, *_ = draw(3)
    with pytest.raises(ValueError, match="do not belong together"):
        fused_moe(x, w13, w2[:, :, :8], weights, ids)
    with pytest.raises(ValueError, match="for 3 tokens"):
        fused_moe(x, w13, w2, weights[:2], ids[:2])
    with pytest.raises(ValueError, match="has shared_w13 and shared_w2"):
        fused_moe(x, w13, w2, weights, ids, shared_w13=w13[0])
    with pytest.raises(ValueError, match="must be a multiple of theirs"):
        fused_moe(x, w13, w2, weights, ids, shared_w13=w13[0, :16], shared_w2=w2[0, :, :8])


# Triton's configurations


def configurations() -> Iterator[Config]:
    narrow, wide = Tile(16, 16, 4, 2), Tile(32, 16, 4, 2, group=3)
    for tables in (False, True):
        yield Config(16, tables, narrow, wide)
        yield Config(16, tables, replace(wide, swap=True), replace(narrow, swap=True, wide=2))
    yield Config(32, True, replace(wide, halve=True), replace(narrow, halve=True, wide=2))


@pytest.mark.skipif("triton" not in PROVIDERS, reason="without Triton")
@pytest.mark.parametrize("config", tuple(configurations()), ids=str)
@pytest.mark.parametrize("tokens", [3, 33])
def test_a_configuration_changes_nothing(config: Config, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_impl = importlib.import_module("atom_patches.kernels.fused_moe.triton_impl")
    monkeypatch.setattr(triton_impl, "config_for", lambda *_, **__: config)
    arguments = draw(tokens, ranks=2, shared=1, gated=True, width=20, hidden=32, seed=7)
    harness.check(FUSED_MOE, "triton", arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.skipif("triton" not in PROVIDERS, reason="without Triton")
@pytest.mark.parametrize("tokens", [16, 17])
def test_a_block_about_half_full(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_impl = importlib.import_module("atom_patches.kernels.fused_moe.triton_impl")
    config = Config(32, True, Tile(16, 16, 4, 2, halve=True), Tile(16, 16, 4, 2, halve=True))
    monkeypatch.setattr(triton_impl, "config_for", lambda *_, **__: config)
    arguments = draw(tokens, skew=True, shared=1, seed=10)
    harness.check(FUSED_MOE, "triton", arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.skipif("triton" not in PROVIDERS, reason="without Triton")
@pytest.mark.parametrize("padded", [0, 40])
@pytest.mark.parametrize("counted", [16, 4096])
def test_the_sort(counted: int, padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_impl = importlib.import_module("atom_patches.kernels.fused_moe.triton_impl")
    monkeypatch.setattr(triton_impl, "COUNTED", counted)
    monkeypatch.setattr(triton_impl, "CHUNK", 32)
    monkeypatch.setattr(triton_impl, "CHUNKS_AT_ONCE", (4,))
    x, w13, w2, _, ids, *_ = draw(90, experts=5, top_k=2, padded=padded, seed=8)
    ids[ids == 3] = 1  # nobody takes expert 3
    config = Config(16, True, Tile(16, 16, 4, 2), Tile(16, 16, 4, 2))
    with harness.poisoned():
        plan = triton_impl.planned(x, w13, w2, ids, None, None, config)
    order, table = plan.where[4:6]
    flat = ids.flatten().long().cpu()
    pairs = torch.arange(180)[flat >= 0]
    expected = pairs[flat[pairs].argsort(stable=True)]
    assert torch.equal(order[: len(pairs)].long().cpu(), expected)
    blocks: list[tuple[int, int, int]] = []
    first = 0
    for expert in range(5):
        rows = int((flat == expert).sum())
        blocks += [(expert, first + start, min(16, rows - start)) for start in range(0, rows, 16)]
        first += rows
    found = table.cpu().T.tolist()
    assert [tuple(block) for block in found[: len(blocks)]] == blocks
    assert all(block[0] == -1 for block in found[len(blocks) :])


@pytest.mark.skipif("triton" not in PROVIDERS, reason="without Triton")
def test_two_runs_give_the_same_bits() -> None:
    triton_impl = importlib.import_module("atom_patches.kernels.fused_moe.triton_impl")
    arguments = draw(20, dtype="bfloat16", shared=1, gated=True)
    first = triton_impl.fused_moe(*arguments)
    assert torch.equal(first, triton_impl.fused_moe(*arguments))


@pytest.mark.skipif(not harness.GPU, reason="programs that run ahead of each other need a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 64, 700])
def test_kernels_that_start_early_wait(tokens: int) -> None:
    triton_impl = importlib.import_module("atom_patches.kernels.fused_moe.triton_impl")
    for seed in range(3):
        arguments = draw(tokens, 64, 8, 128, 256, "bfloat16", shared=1, gated=True, seed=seed)
        plain = tuned.default(Shape(64, 128, 256, 8, torch.bfloat16), tokens, hip=False, shared_memory=99 << 10)
        expected = triton_impl.run(*arguments, plain)
        for _ in range(5):
            assert torch.equal(triton_impl.run(*arguments, replace(plain, early=True)), expected)


@pytest.mark.skipif(not harness.GPU, reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_one_graph_serves_other_routings(tokens: int) -> None:
    arguments = list(draw(tokens, 64, 8, 128, 256, "bfloat16", shared=1, gated=True))
    call = importlib.import_module("atom_patches.kernels.fused_moe.triton_impl").fused_moe
    call(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*arguments)
    for seed, skew in ((1, False), (2, True), (3, False)):
        other = draw(tokens, 64, 8, 128, 256, "bfloat16", skew=skew, padded=tokens // 3, seed=seed)
        for mine, new in zip((arguments[0], *arguments[3:5]), (other[0], *other[3:5]), strict=True):
            mine.copy_(new)
        graph.replay()
        torch.testing.assert_close(
            out, FUSED_MOE.reference(*arguments), rtol=TOLERANCE["bfloat16"][0], atol=TOLERANCE["bfloat16"][1]
        )


def test_the_nearest_measured_batch_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(256, 512, 2048, 8, torch.bfloat16)
    few, many = (
        Config(16, False, Tile(32, 128, 4, 3), Tile(64, 128, 4, 3)),
        Config(64, True, Tile(64, 64, 8, 3), Tile(64, 64, 8, 3)),
    )
    folder = tmp_path / "NVIDIA_H200"
    folder.mkdir()
    found = {"16": {"config": few.as_json(), "us": 1.0}, "1024": {"config": many.as_json(), "us": 2.0}}
    (folder / shape.file).write_text(json.dumps({"gpu": "NVIDIA H200", "tokens": found}))
    monkeypatch.setattr(tuned, "CONFIGS", tmp_path)
    tuned._measured.cache_clear()
    try:

        def chosen(shape: Shape, tokens: int, gpu: str = "NVIDIA H200") -> Config:
            return tuned.config_for(shape, tokens, gpu, hip=False, shared_memory=232448)

        for tokens, config in ((1, few), (16, few), (127, few), (129, many), (16384, many)):
            assert chosen(shape, tokens) == config
        usual = tuned.default(shape, 16, hip=False, shared_memory=232448)
        assert chosen(shape, 16, "Other") == usual != few
        assert chosen(replace(shape, top_k=4), 16) == usual
    finally:
        tuned._measured.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared_memory", [65536, 99 << 10, 163 << 10, 227 << 10])
def test_what_was_not_measured_fits_into_shared_memory(dtype: str, shared_memory: int) -> None:
    shape = Shape(256, 512, 2048, 8, DTYPES[dtype])
    for tokens in (1, 16, 64, 500, 1024, 4096, 16384):
        config = tuned.default(shape, tokens, hip=shared_memory == 65536, shared_memory=shared_memory)
        for tile, halves in ((config.first, 2), (config.second, 1)):
            stage = (tile.n * halves + config.rows) * tile.k * shape.dtype.itemsize
            assert stage * tile.stages <= shared_memory


def test_measured_files_are_for_the_shape_that_they_name() -> None:
    for path in tuned.CONFIGS.glob("*/*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        assert path.parent.name == data["gpu"].replace(" ", "_")
        for tokens, entry in data["tokens"].items():
            assert int(tokens) > 0 and Config.from_json(entry["config"]).rows in (16, 32, 64, 128)


def test_the_benchmark_says_how_many_experts_its_batch_reaches() -> None:
    _, ids = bench.routing(16)
    assert any(f"16 tokens, {len(set(ids.flatten().tolist()))} of 256 experts," in case.label for case in bench.CASES)
