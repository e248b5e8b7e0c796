"""What kernels may use on which GPU, and that those which use more refuse there."""

from __future__ import annotations

from types import SimpleNamespace

import harness
import pytest
import torch

from atom_patches.kernels import launch

pytest.importorskip("triton")


def pretend(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    monkeypatch.setattr(launch, "_target", lambda: SimpleNamespace(backend="cuda", arch=arch))


@pytest.mark.parametrize(("arch", "fp8", "early"), [(80, False, False), (89, True, False), (90, True, True)])
def test_features_of_compute_capabilities(monkeypatch: pytest.MonkeyPatch, arch: int, fp8: bool, early: bool) -> None:
    pretend(monkeypatch, arch)
    assert (launch.converts_e4m3(), launch.has_fp8_dot(), launch.starts_early()) == (fp8, fp8, early)


@pytest.mark.parametrize(("arch", "served"), [(80, False), (90, True)])
def test_who_reads_e4m3_refuses_where_triton_cannot(monkeypatch: pytest.MonkeyPatch, arch: int, served: bool) -> None:
    from atom_patches.kernels.mla_attention.triton_impl import supports_sparse_mla_attention
    from atom_patches.kernels.sparse_indexer.triton_impl import supports_indexer_logits_paged

    pretend(monkeypatch, arch)
    q, cache = torch.zeros(1, 1, 144, dtype=torch.bfloat16), torch.zeros(1, 1, 164, dtype=torch.uint8)
    indices = torch.zeros(1, 1, dtype=torch.int32)
    queries = torch.zeros(1, 1, 128).to(torch.float8_e4m3fn)
    verdicts = [
        supports_sparse_mla_attention(q, cache, indices, 1.0, None, 128),
        supports_indexer_logits_paged(queries, cache, q[:, :, 0].float(), indices, None, indices[:, 0], 1),
    ]
    assert [verdict.ok for verdict in verdicts] == [served, served], verdicts
    assert served or all("8.9" in verdict.reason for verdict in verdicts)


def test_a_decode_step_starts_early_on_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_patches.kernels.gdn_chain._decode_triton import config

    state = torch.zeros(1, 1, 16, 16, device=harness.DEVICE)
    for arch in (80, 90):
        pretend(monkeypatch, arch)
        assert config(state)[2] == (arch == 90)
