"""The results of `bench pcp` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atom_patches.bench.pcp_answer import SHARE, Answer, Row, target
from atom_patches.bench.pcp_model import ROW_LIMIT, Part, Unmeasured
from atom_patches.runtime import pcp_host


def render(answer: Answer) -> str:
    """The results as text: for each length and number of ranks the variants, with the faster of the experts' modes."""
    rows = list(answer.rows())
    lines = [*_preface(answer), ""]
    for length in answer.question.lengths:
        lines += [f"{length:,} tokens on one rank: {_alone_text(answer, length)}"]
        for world in answer.question.worlds:
            mine = [row for row in rows if (row.length, row.world) == (length, world)]
            lines += ["", f"{length:,} tokens on {world} ranks", HEAD, *map(_row_text, _shown(mine))]
        lines.append("")
    lines += [*_summary(answer, rows), "", *_findings(answer)]
    return "\n".join(lines).rstrip()


HEAD = (
    f"  {'kernels':<7} {'attention':<10} {'GatedDeltaNet':<13} {'experts':<9} {'rank':>10} {'waiting':>9} "
    f"{'exchange':>9} {'host':>9} {'TTFT':>10} {'vs stock':>8} {'vs same':>7} {'bound':>10} {'share':>6}  "
    "exchanged by one rank"
)


def _preface(answer: Answer) -> Iterator[str]:
    machine, question = answer.machine, answer.question
    shape, link = question.shape, question.link
    yield f"{machine.device}  ({', '.join(f'{name} {one}' for name, one in machine.versions.items())})"
    if machine.kind == "cpu":
        yield "THE REFERENCES ON A CPU, to try the benchmark itself: these times say nothing about a GPU."
    yield (
        f"{shape.name}: {shape.recurrent_layers} GatedDeltaNet and {shape.attention_layers} full-attention layers, "
        f"{shape.experts} experts of {shape.expert_width} in each, {shape.top_k} a token and one shared"
    )
    yield (
        "Measured: every distinct part of a layer on random data, and counted once a layer. Layers of a kind share one "
        "set of weights; inputs alternate until they exceed three times the L2 cache, but parts whose output is the "
        "next part's input find it cold."
    )
    yield (
        f"A row-wise part or scan of more than {ROW_LIMIT:,} rows is measured with {ROW_LIMIT:,} and counted in "
        "proportion. One step holds the whole prompt (max_num_batched_tokens at least as large)."
    )
    yield (
        f"Modelled: exchanges at {link.bandwidth / 1e9:,.0f} GB/s a direction and {link.latency * 1e6:.0f} us each; "
        "ranks wait for each other there, and nothing overlaps."
    )
    yield (
        f"host: {pcp_host.SECONDS * 1e6:.0f} us for each operation that it issues for the split, and the devices' time "
        f"of a split step counts {pcp_host.SPLIT:g} times, as fitted to 12 layers on two H200; the host's other time, "
        "which one rank has too, is left out. For those 12 layers, whole experts and what `auto` takes, that gives "
        "1.89x at 16,384 tokens (measured: 1.73x), 2.03x at 65,536 (1.98x) and 2.01x at 131,072 (1.97x)."
    )
    yield (
        "rank: the busiest rank's work; vs stock: over one rank with the engine's kernels; vs same: over one rank with "
        "the variant's own; bound: an equal share of the latter plus the exchanges in which all meet; share: of the "
        "bound."
    )
    yield (
        "Kernels: overlay are the engine's with this package's scans, as a patched engine runs them. Attention is the "
        "engine's everywhere, and the first of two passes this package's. Norms have plain weights. In a relay all "
        "meet in full attention, and where experts exchange rows; the final states are shared at the end. experts: "
        "replicate runs a rank's rows through all experts, ep all rows through a share of them (the busiest rank's); "
        "the faster one is shown, both are in --json."
    )


def _alone_text(answer: Answer, length: int) -> str:
    told: list[str] = []
    for kernels in dict.fromkeys(("engine", *answer.question.kernels)):
        try:
            told.append(f"{time_text(answer.alone(length, kernels).seconds)} with {kernels} kernels")
        except Unmeasured as error:
            told.append(f"{kernels} kernels not measured ({error})")
    return ", ".join(told)


def _shown(rows: Sequence[Row]) -> Iterator[Row]:
    """Of rows that differ in the experts only, the fastest."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.variant.kernels, row.variant.attention, row.variant.recurrent), []).append(row)
    for group in groups.values():
        yield _fastest(group) or group[0]


def _fastest(rows: Sequence[Row]) -> Row | None:
    measured = [(row.estimate.seconds, i) for i, row in enumerate(rows) if row.estimate]
    return rows[min(measured)[1]] if measured else None


def _row_text(row: Row) -> str:
    v, found = row.variant, row.estimate
    start = f"  {v.kernels:<7} {v.attention:<10} {v.recurrent:<13} "
    if found is None:
        return f"{start}{row.problem}"
    kinds = "; ".join(
        f"{kind} {time_text(one.seconds)} {size_text(one.bytes)} in {one.count}"
        for kind, one in found.exchanged.items()
    )
    spent = [time_text(one) for one in (found.slowest, found.waiting, found.exchange, found.host, found.seconds)]
    return (
        f"{start}{v.experts:<9} {spent[0]:>10} {spent[1]:>9} {spent[2]:>9} {spent[3]:>9} {spent[4]:>10} "
        f"{row.stock:>8.2f} {row.same:>7.2f} {time_text(row.bound):>10} {row.share:>6.0%}  {kinds}"
    )


def _summary(answer: Answer, rows: Sequence[Row]) -> Iterator[str]:
    """The fastest variant of each case, beside its target; targets are held to the same kernels on both sides."""
    yield "Fastest variant with the same kernels on one rank and on many"
    for length in answer.question.lengths:
        for world in answer.question.worlds:
            for kernels in answer.question.kernels:
                mine = [r for r in rows if (r.length, r.world, r.variant.kernels) == (length, world, kernels)]
                best = _fastest(mine)
                if best is None:
                    yield f"  {length:>9,} tokens, {world} ranks, {kernels:<7}  not measured"
                    continue
                v = best.variant
                gained = f"{best.same:.2f} ({best.stock:.2f} over stock), {best.share:.0%} of the bound"
                yield (
                    f"  {length:>9,} tokens, {world} ranks, {kernels:<7}  {gained}  {_verdict(answer, best)}  "
                    f"{v.attention}, {v.recurrent}, {v.experts}"
                )


def _verdict(answer: Answer, row: Row) -> str:
    wanted = target(answer, row)
    if wanted is None:
        return "[no target]"
    reached = row.same >= wanted and (row.world != 2 or row.share >= SHARE)
    share = f" and {SHARE:.0%}" if row.world == 2 else ""
    return f"[target {wanted}{share}: {'reached' if reached else 'MISSED'}]"


def _findings(answer: Answer) -> Iterator[str]:
    if answer.interrupted:
        yield f"INCOMPLETE  {answer.interrupted}"
    for part, why in answer.problems.items():
        yield f"NOT MEASURED  {part.kind}, {part.kernels}, {part.rows} rows{_of(part)}: {why}"


def _of(part: Part) -> str:
    return f" {list(part.pieces)}" if part.pieces else f" of {part.world} ranks" if part.world > 1 else ""


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:,.1f} ms"


def size_text(bytes: int) -> str:
    return f"{bytes / 1e9:,.2f} GB" if bytes >= 1e9 else f"{bytes / 1e6:,.1f} MB"
