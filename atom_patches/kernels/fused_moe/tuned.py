"""Tile sizes: those that `tools/tune_moe.py` measured on a GPU, else ones that fit the batch.

A measured file is `configs/<GPU>/E…_I…_H…_k…_<dtype>.json`, the GPU's name with underscores for spaces: token
count -> configuration. The nearest count, by ratio, serves.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atom_patches.kernels.registry import dtype_name

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Tile:
    """How one of the two products is cut.

    Args:
        n: output columns of one program (the first product has as many gate and as many up columns).
        k: depth of one step.
        warps, stages: of the program, and of its pipeline of loads.
        swap: the weights are the left operand, so that few tokens make a narrow right one.
        group: row blocks that are walked before the next columns; 1 walks all columns of a row block first.
        halve: a row block that is at most half full is computed as one of half the rows; needs the sort's tables.
        wide: blocks of columns that one program of the second product computes, one after the other.
    """

    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False
    group: int = 1
    halve: bool = False
    wide: int = 1


@dataclass(frozen=True)
class Config:
    """One configuration of the chain.

    Args:
        rows: tokens of one row block.
        tables: the blocks come from a kernel that sorts the pairs of token and expert; without, every program finds
            its own among at most `MOST_UNSORTED` pairs.
        early: each kernel is started before the one in front of it has drained (CUDA, compute capability 9).
    """

    rows: int
    tables: bool
    first: Tile
    second: Tile
    early: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Config:
        return Config(**{**data, "first": Tile(**data["first"]), "second": Tile(**data["second"])})


MOST_UNSORTED = 256
"""Pairs up to which a program may look for its own rows among all of them."""


@dataclass(frozen=True)
class Shape:
    """What a measured file is for."""

    experts: int
    intermediate: int
    hidden: int
    top_k: int
    dtype: torch.dtype

    @property
    def file(self) -> str:
        return f"E{self.experts}_I{self.intermediate}_H{self.hidden}_k{self.top_k}_{dtype_name(self.dtype)}.json"


def config_for(shape: Shape, tokens: int, gpu: str, *, hip: bool, shared_memory: int) -> Config:
    """The configuration for `tokens` tokens on a GPU of that name ("" where none is known).

    Args:
        shared_memory: bytes that one program can have.
    """
    measured = _measured(gpu.replace(" ", "_"), shape) if gpu else {}
    if measured:
        return measured[min(measured, key=lambda count: (abs(math.log(count / max(1, tokens))), count))]
    return default(shape, tokens, hip=hip, shared_memory=shared_memory)


@functools.cache
def _measured(folder: str, shape: Shape) -> dict[int, Config]:
    path = CONFIGS / folder / shape.file
    if not path.is_file():
        return {}
    tokens = json.loads(path.read_text(encoding="utf-8"))["tokens"]
    return {int(count): Config.from_json(entry["config"]) for count, entry in tokens.items()}


def default(shape: Shape, tokens: int, *, hip: bool, shared_memory: int) -> Config:
    """What fits the mean number of rows of an expert, where nothing was measured.

    Few rows: the weights' bytes decide, so many narrow programs with deep pipelines; many: wide tiles.
    """
    pairs = tokens * shape.top_k
    mean = pairs / shape.experts
    rows = 16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 64 else 128
    if shape.dtype == torch.float32:
        rows, first, second = min(rows, 32), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    elif hip:
        warps = 8 if rows == 128 else 4
        first, second = Tile(64, 64, warps, 2), Tile(128, 64, warps, 2)
    elif rows <= 32:
        first, second = Tile(64 if tokens > 1 else 32, 128, 4, 3), Tile(64, 128, 4, 3)
    elif rows == 64:
        first, second = Tile(64, 64, 4, 4), Tile(128, 64, 4, 3)
    else:
        first, second = Tile(128, 64, 8, 4, halve=True), Tile(256, 64, 8, 4, halve=True, wide=2)
    first = _fitted(first, (2 * first.n + rows) * first.k * shape.dtype.itemsize, shared_memory)
    second = _fitted(second, (second.n + rows) * second.k * shape.dtype.itemsize, shared_memory)
    return Config(rows, pairs > MOST_UNSORTED, first, second)


def _fitted(tile: Tile, stage: int, shared_memory: int) -> Tile:
    """The tile with no more stages, of `stage` bytes each, than there is memory for."""
    return replace(tile, stages=max(1, min(tile.stages, shared_memory // stage)))
