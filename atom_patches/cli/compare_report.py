"""What `compare` found: as plain data, as text, and as one HTML file with pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from atom_patches.cli import bench_report

if TYPE_CHECKING:
    from atom_patches.bench.client import Prompt
    from atom_patches.cli.compare import Served

Document = Mapping[str, Any]

CELL, LEFT, LONGEST_ROW = 9, 230, 80
SHOWN = 32
"""Characters of a prompt in the picture."""


def document(
    about: dict[str, Any], prompts: Sequence[Prompt], stock: Served, overlay: Served, tolerance: float
) -> dict[str, Any]:
    """Everything that was found; `findings` is what makes the run a failed one."""
    from atom_patches.bench.answers import compared

    found = compared(stock.answers, overlay.answers, tolerance)
    speeds = {"stock": stock.speeds, "overlay": overlay.speeds}
    applied = _applied(overlay.processes)
    return {
        **about,
        "prompts": [_brief(one) for one in prompts],
        "answers": found.document(),
        "throughput": {side: {**_interval(one), "rounds": one} for side, one in speeds.items()}
        | {"ratio": _ratio(speeds)},
        "applied": applied,
        "findings": [*_findings(stock, overlay, applied), *(f"DIFFERENT  {one}" for one in found.wrong)],
    }


def _brief(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else f"{len(prompt)} tokens: {' '.join(map(str, prompt[:8]))}"
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 2]} …"


def _applied(processes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Patches in place in any of the processes, but those that only look at the configuration."""
    ids = {patch["id"] for one in processes for patch in one["patches"] if patch["state"] == "applied"}
    return sorted(one for one in ids if one.split(".")[1] != "bootstrap")


def _findings(stock: Served, overlay: Served, applied: Sequence[str]) -> Iterator[str]:
    if stock.processes:
        yield "NOT STOCK  the first server's processes were armed"
    if not overlay.processes:
        yield "NOT APPLIED  no process of the second server was armed: is atom_patches installed where the engine is?"
    elif not applied:
        patches = [one for process in overlay.processes for one in process["patches"]]
        why = dict.fromkeys(
            f"{one['id']} is {one['state']}: {one['reason']}" for one in patches if "bootstrap" not in one["id"]
        )
        yield "\n  ".join(["NOT APPLIED  no patch is in place in the second server", *why])


def _interval(values: Sequence[float]) -> dict[str, float]:
    from atom_patches.bench.interval import interval

    return interval(values)._asdict()


def _ratio(speeds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The overlay's over stock's; the ends as far apart as both intervals allow, as rounds are no pairs."""
    stock, overlay = _interval(speeds["stock"]), _interval(speeds["overlay"])
    return {
        "median": overlay["median"] / stock["median"],
        "low": overlay["low"] / stock["high"],
        "high": overlay["high"] / stock["low"],
    }


# Text


def text(found: Document) -> str:
    """The result for a terminal."""
    return "\n".join([*_lines(found), "", *_verdict(found)])


def _lines(found: Document) -> Iterator[str]:
    yield f"stock:    {found['command']}"
    yield f"overlay:  the same with {found['overlay'] or 'the environment alone'}"
    yield f"          {', '.join(found['applied']) or 'nothing applied'}"
    yield ""
    yield from _sentences(found)


def _sentences(found: Document) -> Iterator[str]:
    answers, speeds = found["answers"], found["throughput"]
    yield (
        f"{answers['equal']} of {answers['tokens']} tokens of {len(found['prompts'])} answers are equal "
        f"({answers['share']:.1%}) before answers part"
    )
    yield (
        f"log-probabilities of these are {answers['logprob_worst']:.6f} apart at most, "
        f"{answers['logprob_mean']:.6f} on average"
    )
    yield from _partings(answers["partings"])
    for side in ("stock", "overlay"):
        yield f"{side + ':':<10}{_said(speeds[side], '{:,.1f}')} tokens/s{_level(found)}"
    yield f"{'ratio:':<10}{_said(speeds['ratio'], '{:.3f}')}"


def _partings(partings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in partings:
        margin = "an unknown margin" if one["margin"] is None else f"a margin of {one['margin']:.4f}"
        yield f"  prompt {one['prompt']} parts at token {one['place']}: {one['stock']!r}, {one['overlay']!r}; {margin}"


def _said(found: Mapping[str, float], form: str) -> str:
    return f"{form.format(found['median'])} [{form.format(found['low'])}, {form.format(found['high'])}]"


def _level(found: Document) -> str:
    from atom_patches.bench.interval import ENOUGH

    rounds = len(found["throughput"]["stock"]["rounds"])
    return f", median of {rounds} rounds, {'95 % interval' if rounds >= ENOUGH else 'least and greatest'}"


def _verdict(found: Document) -> list[str]:
    return found["findings"] or [
        f"equal, but for what rounding explains (--tolerance {found['answers']['tolerance']:g})"
    ]


# The page


def page(found: Document) -> str:
    """The report."""
    command, ours = escape(found["command"]), escape(found["overlay"] or "the environment alone")
    ratio: float = found["throughput"]["ratio"]["median"]
    return bench_report.html(
        "Stock and overlay, asked the same",
        [
            f"<p>Stock: <code>{command}</code><br>Overlay: the same with <code>{ours}</code></p>",
            bench_report.findings(found["findings"], _verdict(found)[0]),
            "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in _sentences(found)) + "</ul>",
            "<h2>Tokens, and how far their log-probabilities are apart</h2>",
            strips(found),
            f"<p>From green, equal, to red, {found['answers']['tolerance']:g} apart or more. Black: the first token "
            "that differs; grey: what follows, and is not compared.</p>",
            "<h2>Tokens a second, times as many as stock</h2>",
            bench_report.bars([bench_report.Group("all prompts together", {"overlay": ratio})]),
            bench_report.table(("round", "stock", "overlay"), _rounds(found)),
            "<h2>In place with the overlay</h2>",
            "<p>" + escape(", ".join(found["applied"]) or "nothing") + "</p>",
        ],
    )


def strips(found: Document) -> str:
    """A row of cells a prompt, a cell a token."""
    answers = found["answers"]
    partings: dict[int, int] = {one["prompt"]: one["place"] for one in answers["partings"]}
    drawn: list[str] = []
    top = 4
    for number, (name, gaps) in enumerate(zip(found["prompts"], answers["gaps"], strict=True), 1):
        colours = [_colour(gap, answers["tolerance"]) for gap in gaps]
        if number in partings:
            colours += ["#000", *["#8884"] * (found["new"] - partings[number] - 1)]
        drawn.append(f'<text x="{LEFT - 8}" y="{top + CELL - 1}" text-anchor="end">{escape(name)}</text>')
        for place, colour in enumerate(colours):
            x, y = LEFT + CELL * (place % LONGEST_ROW), top + CELL * (place // LONGEST_ROW)
            drawn.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}"/>')
        top += CELL * max(1, -(-len(colours) // LONGEST_ROW)) + 3
    width = LEFT + CELL * min(LONGEST_ROW, found["new"]) + 4
    return "\n".join([f'<svg viewBox="0 0 {width} {top + 4}" role="img" font-size="9">', *drawn, "</svg>"])


def _colour(gap: float, tolerance: float) -> str:
    share = min(gap / tolerance, 1.0) if tolerance else float(gap > 0)
    return f"hsl({120 * (1 - share):.0f} 65% 45%)"


def _rounds(found: Document) -> Iterator[tuple[str, str, str]]:
    stock, overlay = (found["throughput"][side]["rounds"] for side in ("stock", "overlay"))
    for number, pair in enumerate(zip(stock, overlay, strict=True), 1):
        yield str(number), f"{pair[0]:,.1f}", f"{pair[1]:,.1f}"
