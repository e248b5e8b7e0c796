"""The ratios of a benchmark as a picture: a horizontal bar per provider and case, and a line where the engine is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_patches.kernels.results import CaseReport, Machine

COLOURS = {"triton": "#4477aa", "aiter": "#ee6677", "torch": "#bbbbbb"}
SHORTEST, LONGEST = 0.1, 10.0
"""The ends of the logarithmic axis; a bar that goes further says its ratio."""


class NoPicture(Exception):
    """The picture cannot be drawn; the message says why."""


def draw(path: Path, machine: Machine, found: Sequence[tuple[CaseReport, str | None]]) -> None:
    """Write the picture, of cases and whom `auto` takes in each, in the format that the file's ending names.

    Raises:
        NoPicture: matplotlib is missing, or no case has a ratio.
    """
    shown = [(report, auto) for report, auto in found if any(map(report.ratio, COLOURS))]
    if not shown:
        raise NoPicture(f"{path}: not drawn: no case was timed against an engine's kernel.")
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise NoPicture(
            f"{path}: not drawn: matplotlib is not installed (pip install 'atom-patches[plot]')."
        ) from error
    providers = [name for name in COLOURS if any(report.ratio(name) for report, _ in shown)]
    with matplotlib.rc_context({"svg.hashsalt": "atom_patches", "svg.fonttype": "none", "font.size": 8}):
        figure = figures.Figure(figsize=(9, 1.2 + 0.16 * len(shown) * (len(providers) + 0.6)), layout="constrained")
        axes = figure.subplots()
        _bars(axes, shown, providers)
        axes.set_title(f"Speed against the kernels of {_engine(machine)}, {machine.device}", fontsize=10)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Any, shown: Sequence[tuple[CaseReport, str | None]], providers: Sequence[str]) -> None:
    step = 1 / (len(providers) + 0.6)
    for i, name in enumerate(providers):
        places: list[float] = []
        widths: list[float] = []
        for row, (report, _) in enumerate(shown):
            ratio = report.ratio(name)
            if ratio is not None:
                places.append(row + (i - (len(providers) - 1) / 2) * step)
                widths.append(min(max(ratio, SHORTEST), LONGEST))
                axes.text(widths[-1], places[-1], f" {ratio:.2f}", va="center", fontsize=6)
        # A bar starts at the engine: to the right it is faster, to the left slower.
        axes.barh(places, [w - 1 for w in widths], step * 0.9, left=1.0, color=COLOURS[name], label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(SHORTEST * 0.9, LONGEST * 1.4)
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_xlabel("times as fast as the engine's own kernel; in brackets what auto takes")
    axes.set_yticks(range(len(shown)), [f"{r.operation}  {r.label}  ({auto or 'none'})" for r, auto in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.legend(loc="lower right")


def _engine(machine: Machine) -> str:
    name = machine.engine or "no engine"
    return f"{name} {machine.versions.get(name, '')}".strip()
