"""Sparse latent attention whose warp groups share out the work: when it is served, and what it gives on Hopper."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_mla_attention import Batch, check, some_of
from torch import Tensor

from atom_patches.kernels import launch, registry
from atom_patches.kernels.mla_attention import SPARSE_MLA_ATTENTION

pytest.importorskip("triton")

from atom_patches.kernels.mla_attention import hopper, triton_impl  # noqa: E402

SIZES = (512, 64)
LAYOUTS = ("plain", "packed")
on_hopper = pytest.mark.skipif(
    harness.DEVICE.type != "cuda" or not launch.trades_registers(), reason="needs a GPU of compute capability 9.0"
)


def made(layout: str, heads: int, queries: list[int], keys: list[int], seed: int = 0) -> Batch:
    return Batch(queries, keys, heads=heads, sizes=SIZES, page=64, layout=layout, dtype="bfloat16", tail=1, seed=seed)


@on_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 16, 17, 64, 128])
@pytest.mark.parametrize("count", [1, 63, 129, 2048])
def test_slots_are_attended_to(layout: str, heads: int, count: int) -> None:
    """Entries not in use stand anywhere; the last query has none; what nobody names is NaN."""
    batch = made(layout, heads, [3, 1], [300, 9])
    for unused in (0.0, 0.4, 1.0):
        arguments = batch.sparse(some_of(batch, count, seed=count, unused=unused))
        q, cache, indices, *_ = arguments
        assert hopper.serves(q, cache, indices, SIZES[0]).ok
        check("triton", SPARSE_MLA_ATTENTION, arguments, "bfloat16")


@on_hopper
@given(data=st.data())
def test_ragged_steps(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    queries = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    keys = [data.draw(st.integers(count, 500)) for count in queries]
    batch = made(layout, data.draw(st.sampled_from([2, 16, 32, 128])), queries, keys, seed=data.draw(st.integers(0, 9)))
    count = data.draw(st.sampled_from([5, 64, 65, 512, 2048]))
    indices = some_of(batch, count, seed=1, unused=data.draw(st.sampled_from([0.0, 0.4, 0.95])))
    check("triton", SPARSE_MLA_ATTENTION, batch.sparse(indices), "bfloat16")


@on_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 128])
def test_twice_is_the_same_to_the_bit(layout: str, heads: int) -> None:
    """Groups that do not wait for one another as they should give one thing now and another then."""
    batch = made(layout, heads, [64], [4000])
    arguments = batch.sparse(some_of(batch, 2048, seed=3, unused=0.1))
    first = [part.clone() for part in triton_impl.sparse_mla_attention(*arguments)]
    for _ in range(20):
        assert all(map(torch.equal, triton_impl.sparse_mla_attention(*arguments), first))


@on_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_over_new_slots(layout: str, heads: int) -> None:
    """Whatever decides who works on what is a shape: slots that change, none among them, are met by a captured call."""
    batch = made(layout, heads, [4], [3000])
    q, cache, indices, *rest = batch.sparse(some_of(batch, 2048, seed=5, unused=0.1))
    triton_impl.sparse_mla_attention(q, cache, indices, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_impl.sparse_mla_attention(q, cache, indices, *rest)
    for unused in (0.0, 0.99, 1.0):
        indices.copy_(some_of(batch, 2048, seed=6, unused=unused))
        graph.replay()
        again = triton_impl.sparse_mla_attention(q, cache, indices, *rest)
        assert all(map(torch.equal, captured, again)), unused


def given_arguments(layout: str = "plain") -> tuple[Tensor, Tensor, Tensor]:
    batch = Batch([1], [64], heads=16, sizes=SIZES, page=64, layout=layout, dtype="bfloat16")
    return batch.q, batch.cache, torch.zeros(1, 64, dtype=torch.int32, device=harness.DEVICE)


@pytest.fixture
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    monkeypatch.setattr(launch, "_target", lambda: SimpleNamespace(backend="cuda", arch=90))


@pytest.mark.parametrize("answer", [registry.YES, registry.no("for this test")], ids=["served", "refused"])
def test_who_is_asked_first(monkeypatch: pytest.MonkeyPatch, answer: registry.Verdict) -> None:
    """What these kernels serve they get; what they refuse, the provider's other kernel computes."""
    mine = (torch.empty(0), torch.empty(0))
    monkeypatch.setattr(hopper, "serves", lambda *arguments: answer)
    monkeypatch.setattr(hopper, "sparse_mla_attention", lambda *arguments: mine)
    q, cache, indices = given_arguments()
    if answer.ok:
        assert triton_impl.sparse_mla_attention(q, cache, indices, 1.0, None, 512) is mine
        return
    in_splits = triton_impl.in_splits
    monkeypatch.setattr(triton_impl, "in_splits", lambda launch, *rest: in_splits(lambda out, lse: None, *rest))
    assert triton_impl.sparse_mla_attention(q, cache, indices, 1.0, None, 512)[0].shape == (1, 16, 512)


def test_gluon_is_imported_by_the_first_call_alone() -> None:
    """An engine that never attends to selected latents does not pay for it when it starts."""
    code = (
        "import sys, atom_patches.kernels.mla_attention.triton_impl; "
        "print([name for name in sys.modules if name.startswith('triton.experimental.gluon')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("a_hopper")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_served(layout: str) -> None:
    verdict = hopper.serves(*given_arguments(layout), 512)
    assert verdict.ok == hopper.triton.__version__.startswith(hopper.TRIED), verdict


@pytest.mark.parametrize(("arch", "served"), [(89, False), (90, True), (100, False)])
def test_other_gpus_take_the_other_kernel(monkeypatch: pytest.MonkeyPatch, arch: int, served: bool) -> None:
    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    monkeypatch.setattr(launch, "_target", lambda: SimpleNamespace(backend="cuda", arch=arch))
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    assert hopper.serves(*given_arguments(), 512).ok == served


@pytest.mark.usefixtures("a_hopper")
def test_what_is_not_served_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    q, cache, indices = given_arguments()
    scaled = torch.zeros(1, 64, 576, dtype=torch.uint8, device=harness.DEVICE)
    apart = torch.zeros(4, 64, 576, dtype=torch.bfloat16, device=harness.DEVICE)[::2]
    odd = torch.zeros(1, 16, 577, dtype=torch.bfloat16, device=harness.DEVICE)[..., :576]
    refused = {
        "bfloat16 queries": (q.half(), cache.half(), indices),
        "have one scale": (q, scaled, indices),
        "4097 slots": (q, cache, indices.new_zeros(1, 4097)),
        "one behind the other": (q, apart, indices),
        "multiple of 16 bytes": (odd, cache, indices),
    }
    for reason, arguments in refused.items():
        verdict = hopper.serves(*arguments, 512)
        assert not verdict.ok and reason in verdict.reason, (reason, verdict)
    monkeypatch.setattr(hopper.triton, "__version__", "3.7.1")
    assert "Triton 3.7.1" in hopper.serves(q, cache, indices, 512).reason


def test_a_program_for_each_processor() -> None:
    assert [hopper._splits(132, programs, 32) for programs in (1, 16, 64, 128, 132, 133, 8192)] == [
        32, 8, 2, 1, 1, 1, 1
    ]  # fmt: skip
    assert [hopper._splits(132, 1, tiles) for tiles in (0, 1, 3, 5)] == [1, 1, 2, 4]
