"""Reports of benchmarks as one HTML file: tables, and bars drawn in it as SVG. It loads nothing and runs no script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

COLOURS = {"triton": "#4477aa", "aiter": "#ee6677", "torch": "#999999", "engine": "#ccbb44"}
LOWEST, HIGHEST = 0.1, 10.0
"""The ends of the logarithmic axis; a bar that goes further says its ratio."""

LABEL, PLOT, BAR, GAP = 380, 420, 11, 9
TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .15rem .8rem; text-align: left }
th { border-bottom: 1px solid #888 } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #c03030; font-weight: 600 } svg { width: 100%; height: auto } svg text { fill: currentColor }
"""


class Group(NamedTuple):
    """Bars that belong together: a label, and the ratio of each series."""

    label: str
    ratios: Mapping[str, float]


def page(document: Mapping[str, Any]) -> str:
    """The report of a run, from what `bench --json` writes."""
    machine, cases = document["machine"], document["cases"]
    ceilings = machine["ceilings"]
    parts = [
        f"<p>{_machine(machine)}<br>"
        f"It reaches {ceilings['bandwidth'] / 1e9:,.0f} GB/s and {ceilings['rate'] / 1e12:,.3g} TFLOP/s "
        f"({escape(ceilings['how'])}).</p>",
        _warning(machine),
        findings(document["findings"], f"{len(cases)} cases, nothing wrong."),
        "<h2>Times as fast as the engine's own kernel</h2>",
        bars([_ratios(case) for case in cases]) or "<p>No case was timed against an engine's kernel.</p>",
        "<h2>Every case</h2>",
        table(("case", "provider", "time", "times the engine", "of the roofline", ""), _lines(cases)),
    ]
    return html("Kernels beside the engine's", parts)


def html(title: str, parts: Iterable[str]) -> str:
    """A whole document."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *filter(None, parts), "</html>\n"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells that begin like a number stand to the right."""
    lines = ["<table><tr>", *(f"<th>{escape(one)}</th>" for one in head), "</tr>"]
    for row in rows:
        lines.append("<tr>" + "".join(f"<td{_kind(one)}>{escape(one)}</td>" for one in row) + "</tr>")
    return "\n".join([*lines, "</table>"])


def bars(groups: Sequence[Group]) -> str:
    """Horizontal bars that start at 1: faster is to the right, slower to the left. Empty if nothing is to be drawn."""
    shown = [group for group in groups if group.ratios]
    if not shown:
        return ""
    series = [name for name in COLOURS if any(name in group.ratios for group in shown)]
    series += sorted({name for group in shown for name in group.ratios} - set(series))
    drawn: list[str] = []
    height = 34
    for group in shown:
        drawn += _group(group, series, height)
        height += BAR * len(group.ratios) + GAP
    axis = [line for tick in TICKS for line in _tick(tick, height)]
    size = f'viewBox="0 0 {LABEL + PLOT + 60} {height + 24}"'
    return "\n".join([f'<svg {size} role="img" font-size="10">', *_legend(series), *axis, *drawn, "</svg>"])


def _group(group: Group, series: Sequence[str], top: int) -> Iterator[str]:
    names = [name for name in series if name in group.ratios]
    middle = top + BAR * len(names) / 2 + 3
    yield f'<text x="{LABEL - 8}" y="{middle:.0f}" text-anchor="end">{escape(group.label)}</text>'
    for number, name in enumerate(names):
        ratio, one = group.ratios[name], _place(1.0)
        end, y = _place(ratio), top + BAR * number
        yield (
            f'<rect x="{min(one, end):.1f}" y="{y}" width="{max(abs(end - one), 0.8):.1f}" height="{BAR - 2}" '
            f'fill="{_colour(name)}"/><text x="{max(one, end) + 4:.1f}" y="{y + BAR - 3}">{ratio:.2f}</text>'
        )


def _tick(ratio: float, height: int) -> Iterator[str]:
    x = _place(ratio)
    width = 1.2 if ratio == 1 else 0.4
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{height}" stroke="currentColor" stroke-width="{width}"/>'
    yield f'<text x="{x:.1f}" y="{height + 14}" text-anchor="middle">{ratio:g}</text>'


def _legend(series: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(series):
        x = LABEL + 80 * number
        yield f'<rect x="{x}" y="4" width="10" height="10" fill="{_colour(name)}"/>'
        yield f'<text x="{x + 14}" y="13">{escape(name)}</text>'


def _place(ratio: float) -> float:
    inside = min(max(ratio, LOWEST), HIGHEST)
    return LABEL + PLOT * math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)


def _colour(series: str) -> str:
    return COLOURS.get(series, "#228833")


def _kind(cell: str) -> str:
    if cell.isupper():
        return ' class="bad"'
    return ' class="n"' if cell[:1].isdigit() else ""


def _machine(machine: Mapping[str, Any]) -> str:
    return escape(f"{machine['device']}, {versions(machine['versions'])}")


def _warning(machine: Mapping[str, Any]) -> str:
    told = "The references on a CPU, to try the benchmark itself: these times say nothing about a GPU."
    return f'<p class="bad">{told}</p>' if machine["kind"] == "cpu" else ""


def findings(found: Sequence[str], fine: str) -> str:
    """What is wrong, or that all is fine."""
    if not found:
        return f"<p>{escape(fine)}</p>"
    return "<ul>" + "".join(f'<li class="bad">{escape(one)}</li>' for one in found) + "</ul>"


def _ratios(case: Mapping[str, Any]) -> Group:
    others = {name: one for name, one in case["ratios"].items() if name != "engine" and one is not None}
    return Group(f"{case['operation']}  {case['label']}  ({case['auto'] or 'none'})", others)


def _lines(cases: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for case in cases:
        name = f"{case['operation']}  {case['label']}"
        if case["problem"]:
            yield name, "", "", "", "", case["problem"]
        for provider, served in case["providers"].items():
            yield name, provider, *_figures(case, served, case["ratios"].get(provider))


def _figures(case: Mapping[str, Any], served: Mapping[str, Any], ratio: float | None) -> tuple[str, ...]:
    if served["timing"] is None:
        state = "–" if served["state"] == "refused" else str(served["state"]).upper()
        return state, "", "", served["reason"]
    seconds = served["timing"]["seconds"]
    return time(seconds), "" if ratio is None else f"{ratio:.2f}", f"{case['floor'] / seconds:.1%}", ""


def versions(found: Mapping[str, str]) -> str:
    """What was installed, in one line."""
    return ", ".join(f"{name} {one}" for name, one in found.items())


def time(seconds: float) -> str:
    """A time, in the unit that suits it."""
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"
