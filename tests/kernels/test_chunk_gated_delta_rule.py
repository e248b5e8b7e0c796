"""The chunked gated delta rule: every provider against the references, and segments composed to whole scans.

The references themselves are held to a float64 recurrence in `test_gated_delta_rule.py`.
"""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from atom_patches.kernels import registry
from atom_patches.kernels.gated_delta_rule import TOLERANCE, chunk_gated_delta_rule, chunk_gated_delta_rule_segment
from atom_patches.kernels.gated_delta_rule.chunk import CHUNK_GATED_DELTA_RULE, CHUNK_GATED_DELTA_RULE_SEGMENT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROVIDERS = harness.providers(CHUNK_GATED_DELTA_RULE)
SEGMENT = harness.providers(CHUNK_GATED_DELTA_RULE_SEGMENT)
# Around the boundaries of chunks of 64 rows, and nothing at all.
# Key heads, value heads of each, key and value size: every combination is compiled on a GPU, so they are few.
SHAPES = st.sampled_from([(1, 2, 16, 16), (2, 1, 40, 7)])
LENGTHS = st.lists(st.sampled_from([0, 1, 3, 16, 17, 63, 64, 65, 100, 129]), min_size=1, max_size=4)


class Inputs:
    """Random rows of sequences; with `padded`, in strided storage with NaN between them and rows that none owns."""

    def __init__(
        self, lengths: list[int], key_heads: int = 1, group: int = 2, key: int = 16, value: int = 16, *, seed: int = 0,
        dtype: str = "float32", decay: float = 1.0, padded: bool = False, transposed: bool = False,
    ) -> None:  # fmt: skip
        self._gen, self._padded, kind = torch.Generator().manual_seed(seed), padded, DTYPES[dtype]
        before, after = (2, 3) if padded else (0, 0)
        total, heads = before + sum(lengths) + after, key_heads * group
        self.q, self.k = (self._place(normalize(self._normal(total, key_heads, key), dim=-1), kind) for _ in "qk")
        self.v = self._place(self._normal(total, heads, value), kind)
        self.g = self._place(-decay * torch.rand(total, heads, generator=self._gen), torch.float32)
        self.beta = self._place(torch.rand(total, heads, generator=self._gen), torch.float32)
        ends = torch.tensor([before, *lengths]).cumsum(0)
        self.cu_seqlens = ends.to(harness.DEVICE, torch.int32)
        state = self._normal(len(lengths), heads, value, key).to(harness.DEVICE)
        self.state = state.mT.contiguous().mT if transposed else state
        self.scale = key**-0.5
        if padded:
            for rows in (self.q, self.k, self.v, self.g, self.beta):
                rows[:before] = rows[total - after :] = torch.nan

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._gen)

    def _place(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._padded:
            return x.to(harness.DEVICE, dtype)
        wide = torch.full((x.shape[0] + 1, *x.shape[1:-1], x.shape[-1] + 3), torch.nan, dtype=dtype)
        view = wide.to(harness.DEVICE)[:-1, ..., 1:-2]
        view.copy_(x)
        return view

    def rows(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def arguments(self, state: Tensor | None) -> tuple[Any, ...]:
        return *self.rows(), self.cu_seqlens, state, self.scale, 64

    def segment(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.g, self.beta, self.cu_seqlens


def served(provider: str) -> str:
    """The strictest dtype that the provider serves."""
    return "bfloat16" if provider == "engine" else "float32"


def check(provider: str, x: Inputs, state: Tensor | None) -> None:
    harness.check(CHUNK_GATED_DELTA_RULE, provider, x.arguments(state), tolerance=TOLERANCE[served(provider)])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@harness.examples(4)
@given(
    lengths=LENGTHS,
    shape=SHAPES,
    seed=st.integers(0, 2**31),
    decay=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    resumed=st.booleans(),
    transposed=st.booleans(),
)
def test_every_provider(
    provider: str, dtype: str, lengths: list[int], shape: tuple[int, int, int, int], seed: int, decay: float,
    resumed: bool, transposed: bool,
) -> None:  # fmt: skip
    x = Inputs(lengths, *shape, seed=seed, dtype=dtype, decay=decay, padded=True, transposed=transposed)
    arguments = x.arguments(x.state if resumed else None)
    harness.check(CHUNK_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_half_precision_rows(provider: str, dtype: str) -> None:
    x = Inputs([70, 5, 64], 2, 2, 64, 64, dtype=dtype)
    harness.check(CHUNK_GATED_DELTA_RULE, provider, x.arguments(x.state), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_sequences_at_once(provider: str) -> None:
    """More than the block of offsets that a program reads at once, most of them of one row or none."""
    x = Inputs([1, 0, 1, 2] * 32 + [70], decay=0.2, seed=1, dtype=served(provider))
    check(provider, x, x.state)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_offsets_of_64_bits(provider: str) -> None:
    x = Inputs([2, 70], seed=2, dtype=served(provider))
    x.cu_seqlens = x.cu_seqlens.long()
    check(provider, x, x.state)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_strong_decay_neither_overflows_nor_blurs_its_neighbours(provider: str) -> None:
    x = Inputs([70], seed=3, decay=0.05, dtype=served(provider))
    strong = torch.tensor([-1e5, -90.0, -300.0, -torch.inf, -104.0, -88.0, -5e3, -1e9, -70.0, -1e5])
    x.g[::7] = strong.to(harness.DEVICE)[:, None]
    check(provider, x, x.state)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_neighbours_between_strong_decays_keep_their_own(provider: str) -> None:
    """Half of the tokens decay by e^-200 or more: a sum over the chunk has few bits left for the others."""
    x = Inputs([64], seed=5, decay=0.05, dtype=served(provider))
    x.g[::2] = -1e4
    check(provider, x, None)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_that_no_sequence_owns(provider: str) -> None:
    for lengths in ([3, 66], [0, 0]):
        x = Inputs(lengths, padded=True, dtype=served(provider))
        check(provider, x, x.state)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("likeness", [0.9, 1.0])
def test_keys_that_are_alike(provider: str, likeness: float) -> None:
    """The triangular system then is as far from the identity as it can be; powers of it would overflow."""
    if provider == "engine" and likeness < 1:
        pytest.skip("engines round the system's inverse to the inputs' dtype: see the docstrings of their bindings")
    x = Inputs([128], seed=4, decay=0.0, dtype=served(provider))
    x.k.copy_(normalize(likeness * x.k[:1] + (1 - likeness) * x.k, dim=-1))
    x.beta.fill_(1.0)
    check(provider, x, x.state)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_rows(provider: str, count: int) -> None:
    x = Inputs([0] * count)
    harness.check(CHUNK_GATED_DELTA_RULE, provider, x.arguments(x.state), tolerance=(0.0, 0.0))
    harness.check(CHUNK_GATED_DELTA_RULE, provider, x.arguments(None), tolerance=(0.0, 0.0))
    harness.check(CHUNK_GATED_DELTA_RULE_SEGMENT, provider, x.segment(), tolerance=(0.0, 0.0))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_but_no_sequence(provider: str) -> None:
    x = Inputs([3])
    x.cu_seqlens, x.state = x.cu_seqlens[:1], x.state[:0]
    harness.check(CHUNK_GATED_DELTA_RULE, provider, x.arguments(x.state), tolerance=(0.0, 0.0))
    harness.check(CHUNK_GATED_DELTA_RULE_SEGMENT, provider, x.segment(), tolerance=(0.0, 0.0))


@pytest.mark.parametrize("provider", SEGMENT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@harness.examples(3)
@given(lengths=LENGTHS, shape=SHAPES, seed=st.integers(0, 2**31))
def test_every_provider_of_segments(
    provider: str, dtype: str, lengths: list[int], shape: tuple[int, int, int, int], seed: int
) -> None:
    x = Inputs(lengths, *shape, seed=seed, dtype=dtype, padded=True)
    harness.check(CHUNK_GATED_DELTA_RULE_SEGMENT, provider, x.segment(), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", SEGMENT)
@harness.examples(3)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    decay=st.sampled_from([0.0, 0.02, 1.0]),
)
def test_segments_compose_to_the_whole_scan(provider: str, lengths: list[int], seed: int, decay: float) -> None:
    """The pieces of one sequence, each by itself, then put together from any state."""
    x = Inputs(lengths, seed=seed, decay=decay)
    start, whole = x.state[:1], x.cu_seqlens[[0, -1]]
    _, expected = chunk_gated_delta_rule(*x.rows(), cu_seqlens=whole, initial_state=start)
    ends, maps = (t.double() for t in registry.implementation(CHUNK_GATED_DELTA_RULE_SEGMENT, provider)(*x.segment()))
    state = start[0].double()
    end, total_map = ends[0], maps[0]
    for i in range(len(lengths)):
        state = ends[i] + state @ maps[i]
        if i:
            end, total_map = ends[i] + end @ maps[i], total_map @ maps[i]
    rtol, atol = TOLERANCE["float32"]
    torch.testing.assert_close(state, expected[0].double(), rtol=rtol, atol=atol)
    torch.testing.assert_close(end + start[0].double() @ total_map, expected[0].double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_bounds_with_other_values_in_between(provider: str) -> None:
    x = Inputs([9, 11], seed=5, dtype=served(provider))
    x.cu_seqlens = harness.spread(x.cu_seqlens)
    check(provider, x, x.state)
    if provider in SEGMENT:
        harness.check(CHUNK_GATED_DELTA_RULE_SEGMENT, provider, x.segment(), tolerance=TOLERANCE["float32"])


def test_the_map_of_one_row_is_its_formula() -> None:
    x = Inputs([1], 1, 1, 5, 3, seed=9)
    end, state_map = chunk_gated_delta_rule_segment(*x.segment()[:-1], cu_seqlens=x.cu_seqlens)
    k, v, g, beta = x.k[0, 0].double(), x.v[0, 0].double(), x.g[0, 0].double(), x.beta[0, 0].double()
    eye = torch.eye(5, dtype=torch.float64, device=harness.DEVICE)
    torch.testing.assert_close(end[0, 0].double(), beta * torch.outer(v, k), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        state_map[0, 0].double(), g.exp() * (eye - beta * torch.outer(k, k)), rtol=1e-5, atol=1e-6
    )


def test_as_torch_sees_it() -> None:
    x = Inputs([5, 3], 1, 2, 8, 4, dtype="bfloat16", transposed=True)
    harness.opcheck(CHUNK_GATED_DELTA_RULE, x.arguments(x.state))
    harness.opcheck(CHUNK_GATED_DELTA_RULE, x.arguments(None))
    harness.opcheck(CHUNK_GATED_DELTA_RULE_SEGMENT, x.segment())


def test_what_triton_does_not_serve() -> None:
    triton = pytest.importorskip("atom_patches.kernels.gated_delta_rule.triton_impl")
    x = Inputs([3], 1, 1, 256, 4)
    assert "state of 256 keys" in triton.supports_chunk_gated_delta_rule(*x.arguments(None)).reason
    x = Inputs([3], 1, 1, 8, 4)
    x.q = x.q.bfloat16()
    assert "one dtype" in triton.supports_chunk_gated_delta_rule(*x.arguments(None)).reason
    x.k = x.k.double()
    assert "float64" in triton.supports_chunk_gated_delta_rule_segment(*x.segment()).reason


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_machine_code_of_every_size(size: int) -> None:
    """An assembler's mistake shows now and then only: on a GPU, many batches (see kernels/assembler.py)."""
    batches = [[65, 3, 0, 129], [1], [64], [100, 17], [300, 70]] * 8 if harness.GPU else [[65, 3]]
    for seed, lengths in enumerate(batches):
        x = Inputs(lengths, 1, 2, size, size, seed=seed, dtype="bfloat16", padded=True)
        tolerance = TOLERANCE["bfloat16"]
        harness.check(CHUNK_GATED_DELTA_RULE, "triton", x.arguments(x.state), tolerance=tolerance)
        harness.check(CHUNK_GATED_DELTA_RULE_SEGMENT, "triton", x.segment(), tolerance=tolerance)
