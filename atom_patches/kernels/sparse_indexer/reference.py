"""The sparse indexer in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom_patches.kernels import e4m3

#: Magnitudes below this are quantised as if the largest of their row were this.
SMALLEST = 1e-4
#: Queries whose scores of all heads are held at once: what bounds the memory.
CHUNK = 64


def indexer_queries(q: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    heads, size = q.shape[1:]
    mixed = hadamard(rotate(q, cos, sin, interleaved).to(q.dtype))
    scale = e4m3.power_of_two_above(e4m3.scale_of(mixed, SMALLEST))
    return e4m3.quantize(mixed, scale), gates.float() * scale.squeeze(-1) * (heads * size) ** -0.5


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D] with the first values of each head turned, in float32."""
    half = cos.shape[1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([joined, rest], dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of the last dimension, a power of two, in float32."""
    size = x.shape[-1]
    mixed = x.float()
    step = 1
    while step < size:
        first, second = mixed.unflatten(-1, (-1, 2, step)).unbind(-2)
        mixed = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return mixed * size**-0.5


def indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> None:
    """See the package's schema."""
    values, scales = parts_of(cache)
    page = cache.shape[1]
    real = slots >= 0
    block, place = slots[real].long() // page, slots[real].long() % page
    scale = e4m3.scale_of(key[real], SMALLEST)
    if power_of_two:
        scale = e4m3.power_of_two_above(scale)
    values.view(torch.uint8)[block, place] = e4m3.quantize(key[real], scale).view(torch.uint8)
    scales[block, place] = scale.squeeze(-1)


def indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    values, scales = parts_of(cache)
    page = cache.shape[1]
    key = torch.zeros(total, values.shape[2], dtype=torch.uint8, device=cache.device)
    key_scale = torch.zeros(total, dtype=torch.float32, device=cache.device)
    bounds = cu_seqlens_k.tolist()
    for i in range(len(bounds) - 1):
        position = torch.arange(bounds[i + 1] - bounds[i], device=cache.device)
        block = block_table[i].long()[position // page]
        rows = slice(bounds[i], bounds[i + 1])
        key[rows] = values.view(torch.uint8)[block, position % page]
        key_scale[rows] = scales[block, position % page]
    return key.view(e4m3.DTYPE), key_scale


def indexer_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """See the package's schema."""
    logits = empty_logits(q.shape[0], key.shape[0], q.device)
    wide = key.float()
    column = torch.arange(key.shape[0], device=q.device)
    for first in range(0, q.shape[0], CHUNK):
        some = slice(first, first + CHUNK)
        inside = (column >= start[some, None]) & (column < end[some, None])
        scored = _score(q[some], wide[None], key_scale[None], weights[some])
        logits[some] = scored.masked_fill(~inside, math.nan)
    return logits


def indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    """See the package's schema."""
    values, scales = parts_of(cache)
    page = cache.shape[1]
    logits = torch.full((q.shape[0], max_seqlen_k), math.nan, dtype=torch.float32, device=q.device)
    owners = range(q.shape[0]) if requests is None else requests.tolist()
    for t, (owner, length) in enumerate(zip(owners, lengths.tolist(), strict=True)):
        if owner < 0:
            continue
        position = torch.arange(min(length, max_seqlen_k), device=q.device)
        at = block_table[owner].long()[position // page], position % page
        key = values.view(torch.uint8)[at].view(e4m3.DTYPE).float()
        logits[t, : len(position)] = _score(q[t : t + 1], key[None], scales[at][None], weights[t : t + 1])[0]
    return logits


def topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Tensor:
    """See the package's schema."""
    rows, columns = logits.shape
    first = torch.zeros_like(end) if start is None else start
    column = torch.arange(columns, device=logits.device)
    chosen = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    count = min(k, columns)
    for begin in range(0, rows, CHUNK):
        some = slice(begin, begin + CHUNK)
        inside = (column >= first[some, None]) & (column < end[some, None]) & (logits[some] > -math.inf)
        ranked = logits[some].masked_fill(~inside, -math.inf).sort(dim=1, descending=True, stable=True)
        relative = ranked.indices[:, :count] - first[some, None]
        taken = ranked.values[:, :count] > -math.inf
        ascending = relative.masked_fill(~taken, columns).sort(dim=1).values
        chosen[some, :count] = ascending.masked_fill(ascending == columns, -1).int()
    return chosen


def local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Tensor:
    """See the package's schema."""
    rows = indices.shape[0]
    owner = torch.arange(rows, device=indices.device) if requests is None else requests.long()
    column = indices.long() // block_size
    real = (indices >= 0) & (column < block_table.shape[1]) & (owner >= 0)[:, None]
    if not block_table.numel():
        return torch.full_like(indices, -1, dtype=torch.int32)
    block = block_table[owner.clamp_min(0)[:, None], column.masked_fill(~real, 0)].long()
    slots = block * block_size + indices.long() % block_size
    return slots.masked_fill(~real, -1).int()


def row_pitch(columns: int) -> int:
    """From one row of the ragged logits to the next: what DeepGEMM leaves for its last tile of keys, so that its result
    is ours as it is."""
    return -(-(columns + 256) // 8) * 8


def empty_logits(queries: int, columns: int, device: torch.device) -> Tensor:
    """Ragged logits in the layout that is promised."""
    return torch.empty(queries, row_pitch(columns), dtype=torch.float32, device=device)[:, :columns]


def parts_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The cache's values [B, P, D] in E4M3 and scales [B, P] in float32, as views of its memory."""
    blocks, page, row = cache.shape
    size = row - 4
    raw = cache.view(torch.uint8)
    values = raw.as_strided((blocks, page, size), (raw.stride(0), size, 1))
    of_scales = (blocks, page * 4), (raw.stride(0), 1), raw.storage_offset() + page * size
    return values.view(e4m3.DTYPE), raw.as_strided(*of_scales).view(torch.float32)


def _score(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor) -> Tensor:
    """q [C, H, D], key [1, S, D], key_scale [1, S], weights [C, H] -> [C, S]."""
    scores = torch.relu(q.float() @ key.mT)
    return (scores * weights.float()[:, :, None]).sum(1) * key_scale
