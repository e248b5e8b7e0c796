"""The oracle of sparse attention: dense where all is selected, another answer where not, the overlay's selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from torch import Tensor

from atom_patches.models.lightning_indexer import IndexerShape, Selection, select, write_keys
from atom_patches.runtime.sparse_plan import Workspace
from tests.sglang import sparse_oracle
from tests.sglang.engines import prompt

LENGTH = 150


def load(name: str, family: str = "DeepseekV32ForCausalLM") -> Any:
    import transformers

    return getattr(transformers, family).from_pretrained(checkpoint(name), dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    return model(torch.tensor([prompt(LENGTH)])).logits[0].log_softmax(-1)


def selections(model: Any) -> list[tuple[Any, tuple[Any, ...], Tensor]]:
    """Of each layer the indexer, what it was given, and what it selected."""
    seen: list[tuple[Any, tuple[Any, ...], Tensor]] = []

    def note(indexer: Any, given: tuple[Any, ...], selected: Tensor) -> None:
        seen.append((indexer, given, selected))

    hooks = [layer.self_attn.indexer.register_forward_hook(note) for layer in model.model.layers]
    logprobs(model)
    for hook in hooks:
        hook.remove()
    return seen


def test_where_all_is_selected_it_is_deepseek_v3() -> None:
    dense = logprobs(load("deepseek_v32_dense", "DeepseekV3ForCausalLM"))
    torch.testing.assert_close(logprobs(load("deepseek_v32_dense")), dense, rtol=0, atol=5e-5)


def test_it_matters_what_is_selected() -> None:
    top_k = load("deepseek_v32").config.index_topk
    apart = (logprobs(load("deepseek_v32")) - logprobs(load("deepseek_v32_dense"))).abs().amax(1)
    assert apart[:top_k].max() < 5e-5
    assert apart[2 * top_k :].mean() > 0.5


def test_the_checkpoint_s_selection_hardly_depends_on_rounding() -> None:
    """Otherwise engines in bfloat16 could not be told from wrong ones."""
    model = load("deepseek_v32")
    exact = [output for *_, output in selections(model)]
    with sparse_oracle.served("bfloat16", model):
        rounded = [output for *_, output in selections(model)]
    top_k = model.config.index_topk
    pairs = zip(exact, rounded, strict=True)
    other = [(a[0].sort().values != b[0].sort().values).any(-1)[top_k:] for a, b in pairs]
    assert torch.stack(other).float().mean() < 0.02


@pytest.mark.parametrize("page", [1, 64])
@torch.no_grad()
def test_the_overlay_selects_the_same(page: int) -> None:
    """With weights that settle nothing, so that rounding decides often."""
    model = load("deepseek_v32")
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        for name, weight in layer.self_attn.indexer.named_parameters():
            if "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    with sparse_oracle.served("bfloat16", model):
        seen = selections(model)
    assert len(seen) == len(model.model.layers)
    for indexer, given, expected in seen:
        found = _by_the_overlay(indexer, given, page, generator)
        top_k = indexer.index_topk
        assert torch.equal(found[top_k:], expected[0, top_k:].sort().values)
        for row in range(top_k):  # transformers masks what comes later, whatever it selects
            assert found[row].tolist() == [-1] * (top_k - row - 1) + list(range(row + 1))


def _by_the_overlay(indexer: Any, given: tuple[Any, ...], page: int, generator: torch.Generator) -> Tensor:
    """Positions, ascending; tokens lie in pages in any order."""
    [hidden], [residual], [cos], [sin] = given[0], given[1], *given[2]
    rows, half = len(hidden), cos.shape[-1] // 2
    shape = IndexerShape(indexer.n_heads, indexer.head_dim, 2 * half, indexer.index_topk, interleaved=False)
    pages = -(-rows // page)
    table = torch.randperm(pages, generator=generator).int()[None] + 1
    position = torch.arange(rows)
    slots = table[0][position // page] * page + position % page
    cache = torch.zeros(pages + 1, page, indexer.head_dim + 4, dtype=torch.uint8)
    cos, sin = cos[:, :half], sin[:, :half]
    write_keys(indexer.k_norm(indexer.wk(hidden)), cos, sin, slots, cache, shape)
    ends = (position + 1).int()
    what = Selection(rows, table, torch.zeros(rows, dtype=torch.int32), ends, rows, ragged=None)
    query = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    out = torch.empty(rows, indexer.index_topk, dtype=torch.int32)
    select(query, indexer.weights_proj(hidden), cos, sin, cache, what, shape, Workspace(1 << 24, 64), out)
    where = torch.full(((pages + 1) * page + 1,), -1)
    where[slots] = position
    return where[out.long()].masked_fill(out < 0, -1).sort().values.int()
