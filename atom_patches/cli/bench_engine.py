"""`bench engine`: an engine's own model and the ATOM decoder on one device, measured in turn."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom_patches import arming
from atom_patches.cli import CommandError, bench_report
from atom_patches.core import settings

if TYPE_CHECKING:
    from atom_patches.bench.engine_cells import Found, Model
    from atom_patches.bench.engines import Engine
    from atom_patches.cli.parsing import Commands

NAMES = ("qwen35b", "qwen8b", "tiny", "tiny-dense")
LINE = "  {:<32}{:>28}{:>28}{:>28}"
UNUSED = "the overlay's decoder has no such kernel here, so it was not measured"

Row = tuple[str, str, str, str]
"""A cell, a side's time, the overlay's, and how many times as fast it is."""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "bench engine",
        "time whole engines, stock and with ATOM decoders, in turn",
        "Start vLLM or SGLang stock and with ATOM decoders on the same GPU, with seeded weights and the same options; "
        "compare their answers; time decode steps and prefills in turn. Exit status: 0 fine, 1 answers differ, a side "
        "ran another model than it should, a cell is slower than 0.99 times stock, or something was not measured, "
        "2 no GPU.",
        [
            ("bench engine --raw found", "the shapes of Qwen3.6-35B-A3B, 12 layers, and of Qwen3-8B"),
            ("bench engine --models qwen35b --batches 16 --lengths 4096", "one model, two cells"),
            ("bench engine --models qwen35b --fusions", "what each fusion brings"),
            ("bench engine --engine sglang --option attention_backend=triton", "SGLang, on one of its backends"),
            ("bench engine --device cpu --rounds 2", "try the command without a GPU"),
        ],
    )
    parser.add_argument("--engine", choices=arming.ENGINES, help="whose models; else the installed one's, vLLM's first")
    parser.add_argument("--models", type=_models, help=f"some of {','.join(NAMES)}")
    parser.add_argument("--batches", type=_numbers, help="decode steps of so many requests, separated by commas")
    parser.add_argument("--lengths", type=_numbers, help="prefills of so many tokens, separated by commas")
    parser.add_argument(
        "--fusions", type=_fusions, nargs="?", const=settings.FUSIONS, default=(),
        help=f"one more engine without each of {','.join(settings.FUSIONS)}, or of those named",
    )  # fmt: skip
    parser.add_argument(
        "--option", type=_option, action="append", default=[], metavar="NAME=VALUE",
        help="one more option of the engine, in Python's spelling, for all sides; the value is JSON, or a text",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has; a hybrid's in fours")
    parser.add_argument("--rounds", type=int, default=6, help="medians of so many; an interval takes 6 (6)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu: tiny models")
    parser.add_argument("--no-profile", action="store_true", help="leave out the GPU time of each kernel")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for a start, and for a cell (600)")
    parser.add_argument(
        "--raw", type=Path, default=Path("bench-engine"), metavar="FOLDER", help="for all that was found"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots, one file by itself")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure one model after the other, print the table, and write everything; also when cut short."""
    from atom_patches.bench import engine_pair
    from atom_patches.bench.engine_cells import DEFAULT, Found

    engine = _engine(arguments.engine)
    if arguments.device == "cuda" and not _has_gpu():
        print("atom_patches: torch finds no GPU here; --device cpu tries the command without one", file=sys.stderr)
        return 2
    if refusal := engine.refusal(arguments.device):
        raise CommandError(refusal)
    for path in (arguments.json, arguments.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: there is no such directory.")
    asked = [_asked(name, arguments) for name in arguments.models or DEFAULT[arguments.device]]
    folder: Path = arguments.raw.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        Found(model, arguments.device, engine.label, engine.expected(arguments.device, model.experts))
        for model in asked
    ]

    def save() -> None:
        for path in (folder / "engine.json", arguments.json):
            if path is not None:
                path.write_text(json.dumps(document(found), indent=1) + "\n", encoding="utf-8")

    tell, profile = engine_pair.clock(), arguments.device == "cuda" and not arguments.no_profile
    for one in found:
        tell(f"{one.model.label}: starting {'the' if arguments.fusions else 'both'} engines")
        how = engine_pair.Asked(
            engine, one.model, arguments.device, arguments.layers, arguments.rounds, profile, arguments.limit,
            folder, arguments.fusions, dict(arguments.option),
        )  # fmt: skip
        engine_pair.measure(how, tell, save, one)
        if one.broken == "interrupted":
            break
    print(text(document(found)))
    if arguments.html is not None:
        arguments.html.write_text(page(document(found)), encoding="utf-8")
    return 1 if document(found)["findings"] else 0


def document(found: Sequence[Found]) -> dict[str, Any]:
    """Everything as plain data, as `--raw` keeps it."""
    missing = [f"INCOMPLETE  {one.model.size}: not begun" for one in found if not one.sides and not one.broken]
    return {
        "models": [one.document() for one in found],
        "findings": [line for one in found for line in one.findings()] + missing,
        "notes": [line for one in found for line in one.notes()],
    }


# Text and page


def text(found: Mapping[str, Any]) -> str:
    """The table, then what is wrong."""
    lines: list[str] = []
    for model in found["models"]:
        lines += [*_model_lines(model), ""]
    return "\n".join([*lines, *found["notes"], *(found["findings"] or ["nothing wrong"])])


def _model_lines(model: Mapping[str, Any]) -> Iterator[str]:
    about = model["sides"].get("stock", {})
    yield f"{_title(model)}  ({about.get('device', '')}, {bench_report.versions(about.get('versions', {}))})"
    if model["device"] == "cpu":
        yield "TINY MODELS ON A CPU, to try the benchmark itself: these times say nothing about a GPU."
    yield from (f"  {side}: {_ran(about)}" for side, about in model["sides"].items())
    if answers := model["answers"]:
        yield (
            f"{answers['equal']} of {answers['tokens']} tokens equal before answers part, log-probabilities "
            f"{answers['logprob_worst']:.5f} apart at most"
        )
    yield f"  {_spread(model):<32}{'stock':>24}{'overlay':>24}{'times as fast':>24}{'target':>8}"
    for row in _rows(model):
        yield "  {:<32}{:>24}{:>24}{:>24}{:>8}".format(*row)
    yield from (f"  {fusion}: {UNUSED}" for fusion in _of_fusions(model, "unused"))
    for fusion, about in _of_fusions(model, "measured").items():
        yield LINE.format(f"{about['label']}:", "without", "with (overlay)", "times as fast")
        yield from (LINE.format(*row) for row in _fusion_rows(model, fusion, about["side"]))


def _title(model: Mapping[str, Any]) -> str:
    return f"{model['label']}, {model['engine']}" if model["engine"] else model["label"]


def _ran(about: Mapping[str, Any]) -> str:
    """A side's model, what it runs as one kernel, and what is captured."""
    return ", ".join([about["model"], *(f"{one} fused" for one in about["fusions"]), about["graphs"]])


def _of_fusions(model: Mapping[str, Any], what: str) -> Any:
    return model.get("fusions", {}).get(what, {})


def _spread(model: Mapping[str, Any]) -> str:
    from atom_patches.bench.interval import ENOUGH

    rounds = min((len(cell["rounds"]["stock"]) for cell in model["cells"]), default=0)
    return f"milliseconds [{'95 % interval' if rounds >= ENOUGH else 'least, greatest'}]"


def _rows(model: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    for cell in model["cells"]:
        target = f"{cell['target']['least']:.2f}" if cell["target"] else ""
        for row, last in zip(_beside(cell, "stock", cell["stock"], cell["ratio"]), (target, ""), strict=False):
            yield *row, last


def _fusion_rows(model: Mapping[str, Any], fusion: str, side: str) -> Iterator[Row]:
    for cell in model["cells"]:
        found = cell["fusions"][fusion]
        yield from _beside(cell, side, found["without"], found["ratio"])


def _beside(
    cell: Mapping[str, Any], side: str, seconds: Mapping[str, float], ratio: Mapping[str, float]
) -> Iterator[Row]:
    """A side and the overlay: their times and, where it is known, the GPU's."""
    yield cell["label"], _said(seconds, 1000), _said(cell["overlay"], 1000), _said(ratio, 1)
    if cell["gpu"]:
        before, after = (cell["gpu"][one]["gpu_us"] / 1000 for one in (side, "overlay"))
        yield "  on the GPU", f"{before:.3f}", f"{after:.3f}", f"{before / after:.3f}"


def _said(found: Mapping[str, float], times: float) -> str:
    return f"{times * found['median']:.3f} [{times * found['low']:.3f}, {times * found['high']:.3f}]"


def page(found: Mapping[str, Any]) -> str:
    """The report."""
    parts = [bench_report.findings([*found["findings"], *found["notes"]], "No cell is slower than 0.99 times stock.")]
    for model in found["models"]:
        groups = [bench_report.Group(cell["label"], {"overlay": cell["ratio"]["median"]}) for cell in model["cells"]]
        parts += [
            f"<h2>{_title(model)}: times as fast as stock</h2>",
            *(f"<p>{side}: {_ran(about)}.</p>" for side, about in model["sides"].items()),
            '<p class="bad">Tiny models on a CPU: nothing about a GPU.</p>' if model["device"] == "cpu" else "",
            bench_report.bars(groups),
            bench_report.table((_spread(model), "stock", "overlay", "times as fast", "target"), _rows(model)),
            *(f"<p>{fusion}: {UNUSED}.</p>" for fusion in _of_fusions(model, "unused")),
        ]
        for fusion, about in _of_fusions(model, "measured").items():
            rows = _fusion_rows(model, fusion, about["side"])
            parts += [
                f"<h3>{about['label']}: times as fast with as without</h3>",
                bench_report.table((_spread(model), "without", "with (overlay)", "times as fast"), rows),
            ]
    return bench_report.html("Engines' own models and ATOM decoders", parts)


# Input


def _engine(name: str | None) -> Engine:
    """The one asked for, else the first that is installed.

    Raises:
        CommandError: it is not there, or there is none.
    """
    from atom_patches.bench.engines import ENGINES

    asked = list(ENGINES.values()) if name is None else [ENGINES[name]]
    for engine in asked:
        if engine.installed():
            return engine
    missing = " or ".join(engine.label for engine in asked)
    raise CommandError(f"bench engine needs {missing}, which is not installed in this environment.")


def _asked(name: str, arguments: argparse.Namespace) -> Model:
    from atom_patches.bench.engine_cells import MODELS

    model = MODELS[name]
    if arguments.layers < 0 or arguments.rounds < 1:
        raise CommandError("--layers and --rounds take whole numbers above 0.")
    if arguments.layers % 4 and not name.endswith(("8b", "dense")):
        raise CommandError(f"--layers {arguments.layers}: {name} has them in fours, the last of attention.")
    return dataclasses.replace(
        model, batches=arguments.batches or model.batches, lengths=arguments.lengths or model.lengths
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no model; they are {', '.join(NAMES)}")
    return names


def _fusions(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in settings.FUSIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no fusion; they are {', '.join(settings.FUSIONS)}")
    return tuple(dict.fromkeys(names))


def _option(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    if not given or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE is needed, such as attention_backend=triton")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers above 0, separated by commas, are needed")
    return tuple(map(int, words))
