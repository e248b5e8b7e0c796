"""`new patch ID` and `new kernel NAME`: the files to begin with, in a checkout. They pass the checks as they are."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from atom_patches import arming
from atom_patches.cli import CommandError, catalogue
from atom_patches.cli.parsing import PROGRAM
from atom_patches.core.patch import Target

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands

PACKAGE = Path(__file__).parents[1]
TEMPLATES = Path(__file__).with_name("templates")

CONDITIONS = {
    "vllm": ("VllmConfig", "vllm.config", "config.parallel_config.data_parallel_size"),
    "sglang": ("ServerArgs", "sglang.srt.server_args", "config.dp_size"),
}
"""An engine's configuration: its type, where that is, and an option that patches can decide by."""


def add_to(commands: Commands) -> None:
    """Declare both commands."""
    patch = commands.add(
        "new patch",
        "begin a patch: a file that passes the checks and changes nothing yet",
        "Write atom_patches/ENGINE/FEATURE/NAME.py, which hands every call to the original. Works in a checkout.",
        [
            (
                "new patch vllm.example.post_step --target vllm.v1.engine.core:EngineCore.post_step",
                "one file, and what to do next",
            )
        ],
    )
    patch.add_argument("id", metavar="ID", help="ENGINE.FEATURE.NAME, all in lower case")
    patch.add_argument("--target", required=True, metavar="MODULE:NAME", help="what it replaces: module:Class.method")
    patch.add_argument("--json", action="store_true", help="print one JSON object")
    patch.set_defaults(run=new_patch)
    kernel = commands.add(
        "new kernel",
        "begin an operation: its schema, reference, Triton kernel, benchmark and test",
        "Write atom_patches/kernels/NAME and tests/kernels/test_NAME.py: an operation that doubles its input, with "
        "everything that one has. Works in a checkout.",
        [("new kernel example", "a package, a test, and what to do next")],
    )
    kernel.add_argument("id", metavar="NAME", help="in lower case, words joined by _")
    kernel.add_argument("--json", action="store_true", help="print one JSON object")
    kernel.set_defaults(run=new_kernel)


def new_patch(arguments: argparse.Namespace) -> int:
    """Write the file of a patch."""
    found = re.fullmatch(r"([a-z]+)\.([a-z][a-z0-9_]*)\.([a-z][a-z0-9_]*)", arguments.id)
    if found is None or found[1] not in arming.ENGINES:
        engines = " or ".join(arming.ENGINES)
        raise CommandError(f"an id is ENGINE.FEATURE.NAME, with {engines} for ENGINE; got {arguments.id!r}.")
    try:
        target = Target.parse(arguments.target)
    except ValueError as error:
        raise CommandError(f"{error}, such as vllm.v1.engine.core:EngineCore.post_step.") from error
    engine, feature, name = found.groups()
    config, module, option = CONDITIONS[engine]
    values = {
        "id": arguments.id,
        "group": f"{engine}.{feature}",
        "target": str(target),
        "function": target.qualname.rpartition(".")[2],
        "supports": _supported(engine),
        "config": config,
        "module": module,
        "option": option,
    }
    folder = _checkout() / "atom_patches" / engine / feature
    files = {folder / f"{name}.py": _filled("patch.py.txt", values)}
    if not (folder / "__init__.py").exists():
        files[folder / "__init__.py"] = f'"""What the patches of {engine}.{feature} do together."""\n'
    steps = [f"{PROGRAM} accept --ship {arguments.id}", f"python -m pytest tests/ordering tests/drift -k {name}"]
    _write(files)
    _tell(arguments.json, files, f"next, in the environment that has {engine}", steps)
    return 0


def new_kernel(arguments: argparse.Namespace) -> int:
    """Write the files of an operation."""
    name: str = arguments.id
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
        raise CommandError(f"a name has lower-case letters, digits and _, got {name!r}.")
    checkout = _checkout()
    folder = checkout / "atom_patches" / "kernels" / name
    if folder.exists():
        raise CommandError(f"{folder} is there already.")
    values = {"name": name, "NAME": name.upper()}
    parts = ("__init__", "reference", "triton_impl", "bench")
    files = {folder / f"{part}.py": _filled(f"kernel_{part.strip('_')}.py.txt", values) for part in parts}
    files[checkout / "tests" / "kernels" / f"test_{name}.py"] = _filled("kernel_test.py.txt", values)
    steps = [
        f"python -m pytest tests/kernels/test_{name}.py",
        f"python tools/compile_kernels.py {name}",
        "python tools/kernel_table.py --write",
    ]
    _write(files)
    _tell(arguments.json, files, "next", steps)
    return 0


def _checkout() -> Path:
    root = PACKAGE.parent
    if not (root / "setup.py").is_file():
        raise CommandError(
            f"this package is installed in {root}, not in a checkout, where patches and kernels are added."
        )
    return root


def _supported(engine: str) -> str:
    """The versions that patches of an engine state nowadays."""
    (described,) = (one for one in catalogue.engines() if one.name == engine)
    stated = [patch.supports for patch in catalogue.patches(described)]
    return max(set(stated), key=stated.count)


def _filled(template: str, values: dict[str, str]) -> str:
    return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)


def _write(files: dict[Path, str]) -> None:
    for path in files:
        if path.exists():
            raise CommandError(f"{path} is there already.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _tell(as_json: bool, files: dict[Path, str], heading: str, steps: list[str]) -> None:
    """Say what was written, and what to run next."""
    if as_json:
        print(json.dumps({"written": [str(path) for path in files], "next": steps}, indent=1))
        return
    lines = [*(f"wrote {path}" for path in files), f"{heading}:", *(f"  {step}" for step in steps)]
    print("\n".join(lines))
