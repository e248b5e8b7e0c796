"""What plain parts know of the step that is running."""

from __future__ import annotations

from atom_patches.runtime.scope import Scope

#: Sequences of the step, each with its number of rows; rows behind them are padding.
ROWS: Scope[list[tuple[int, int]]] = Scope("list of rows")
