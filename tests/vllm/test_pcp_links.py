"""Each collective that a step may enter is entered once before the model is loaded, alike on all ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from atom_patches.core import PatchError  # noqa: E402
from atom_patches.vllm.adapters import pcp_links, pcp_support  # noqa: E402
from atom_patches.vllm.pcp import ranks_agree  # noqa: E402
from tests.vllm import ranks_in_threads  # noqa: E402
from tests.vllm.ranks_in_threads import run_ranks  # noqa: E402

ALWAYS = {"all_gather", "broadcast"}
EXPERTS = {"all_reduce", "reduce_scatter"}
HYBRID = {"all_to_all"}


class Group(ranks_in_threads.Group):
    """Notes the collectives."""

    def note(self, name: str, tensor: Any) -> None:
        self.__dict__.setdefault("entered", []).append((name, tensor.numel() * tensor.element_size()))

    def all_gather(self, tensor: Any, dim: int) -> Any:
        self.note("all_gather", tensor)
        return super().all_gather(tensor, dim)

    def broadcast(self, tensor: Any, src: int) -> Any:
        self.note("broadcast", tensor)
        return super().broadcast(tensor, src)

    def all_reduce(self, tensor: Any) -> Any:
        self.note("all_reduce", tensor)
        return super().all_reduce(tensor)

    def reduce_scatter(self, tensor: Any, dim: int) -> Any:
        self.note("reduce_scatter", tensor)
        return super().reduce_scatter(tensor, dim)

    def send(self, tensor: Any, dst: int) -> None:
        self.note(f"send {dst}", tensor)
        super().send(tensor, dst)


def all_to_all_single(received: Any, sent: Any, *, group: Any) -> None:
    group.note("all_to_all", sent)
    ranks_in_threads.all_to_all_single(received, sent, group=group)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("hybrid", "spread"), [(True, True), (True, False), (False, True), (False, False)])
def test_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, hybrid: bool, spread: bool, ranks: int) -> None:
    groups: dict[int, Group] = {}
    monkeypatch.setattr(pcp_links, "BYTES", (1 << 10, 1 << 16))
    monkeypatch.setattr(pcp_links, "get_pcp_group", lambda: groups[threading.get_ident()])
    monkeypatch.setattr(pcp_links, "experts_are_spread", lambda config: spread)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)
    for check in ("check_ranks_agree", "check_link"):
        monkeypatch.setattr(pcp_support, check, lambda *args: None)
    loaded: list[set[str]] = []

    def load(worker: Any) -> None:
        loaded.append({name for name, _ in groups[threading.get_ident()].__dict__.get("entered", [])})

    worker: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=ranks),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(is_hybrid=hybrid)),
    )

    def work(given: ranks_in_threads.Group) -> list[tuple[str, int]]:
        group = groups[threading.get_ident()] = Group(given.meeting, given.rank_in_group)
        ranks_agree.compare_then_load(load)(worker)
        return group.__dict__["entered"]

    results = run_ranks(ranks, work)
    wanted = ALWAYS | (EXPERTS if spread else set()) | (HYBRID if hybrid else set())
    assert len(loaded) == ranks and all(wanted <= names for names in loaded)
    for rank, entered in enumerate(results):
        handed = {f"send {rank + 1}"} if hybrid and rank < ranks - 1 else set()
        assert {name for name, _ in entered} == wanted | handed
        assert max(size for _, size in entered) > 1 << 15, "NCCL takes other ways for more bytes"


def test_an_engine_of_one_rank_in_the_same_process_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcp_links, "open_links", None)
    worker: Any = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=1))
    assert ranks_agree.compare_then_load(lambda worker: "loaded")(worker) == "loaded"


@pytest.mark.parametrize("differ", [True, False])
def test_ranks_that_would_spread_experts_differently_are_refused(monkeypatch: pytest.MonkeyPatch, differ: bool) -> None:
    """Their environment is the same, and the GPUs' memory is not."""
    monkeypatch.delenv("ATOM_PCP_MOE", raising=False)
    first: list[Any] = []

    def broadcast(own: Any, src: int) -> Any:
        first.append(own)
        return first[0]

    config: Any = SimpleNamespace(model_config=SimpleNamespace(is_moe=True))
    monkeypatch.setattr(
        pcp_support, "get_world_group", lambda: SimpleNamespace(rank_in_group=1, broadcast_object=broadcast)
    )
    monkeypatch.setattr(pcp_support, "expert_mode", lambda config: "shard" if differ and first else "replicate")
    pcp_support.check_ranks_agree(config)
    if differ:
        with pytest.raises(PatchError, match=r"'experts': 'shard'.*'experts': 'replicate'.*say shard or replicate"):
            pcp_support.check_ranks_agree(config)
    else:
        pcp_support.check_ranks_agree(config)
