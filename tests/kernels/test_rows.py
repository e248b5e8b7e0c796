"""Where rows lie, and that tiles cover them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.kernels import rows


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
)
def test_every_row_is_found(shape: list[int], order: object, step: int) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    wide = torch.arange(int(torch.tensor(shape).prod()) * step).view([shape[d] for d in dims] + [step])[..., 0]
    x = wide.permute([dims.index(d) for d in range(len(shape))])
    (flat,), count, inner, ((outer_stride, inner_stride, column_stride),) = rows.rows_of(x)
    size = shape[-1]
    assert count * size == x.numel()
    for number, row in enumerate(x.reshape(-1, size)):
        start = flat.storage_offset() + number // inner * outer_stride + number % inner * inner_stride
        memory = torch.as_strided(flat, (size,), (column_stride,), start)
        assert torch.equal(memory, row)


def test_tensors_share_one_division_into_rows() -> None:
    whole, part = torch.zeros(3, 2, 4), torch.zeros(3, 5, 4)[:, :2]
    found = rows.rows_of(whole, part)
    assert found.inner == 2
    assert found.strides == ((8, 4, 1), (20, 4, 1))
    assert found.tensors[0] is whole and found.tensors[1] is part


def test_rows_at_one_stride_need_no_division() -> None:
    assert rows.rows_of(torch.zeros(3, 2, 8)[..., :4]).inner == 1
    assert rows.rows_of(torch.zeros(6, 8)[:, :4]).strides == ((8, 0, 1),)


@given(count=st.integers(1, 10**6), size=st.integers(1, 20000), itemsize=st.sampled_from([2, 4]))
def test_tiles(count: int, size: int, itemsize: int) -> None:
    taken, columns, warps = rows.tile(count, size, itemsize)
    assert size <= columns < 2 * size or columns == 1 == size
    assert taken & (taken - 1) == 0 == warps & (warps - 1)
    assert 1 <= warps <= 16
    assert rows.programs(count, taken) * taken >= count > (rows.programs(count, taken) - 1) * taken
    assert taken == 1 or count > rows.FEW
