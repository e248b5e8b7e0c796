"""Write down the signatures of the functions of AITER that the bindings call, as `signatures-*.json` of the stand-in.

    python tools/aiter_signatures.py --wheel amd_aiter-….whl             a wheel of PyPI
    python tools/aiter_signatures.py --checkout ../aiter --version 2026-08   a checkout of ROCm/aiter
    python tools/aiter_signatures.py --recorded signatures.json --version 2026-08   a list of all public signatures

Nothing of AITER is imported or run: signatures are read from its sources. The file holds those functions only that
some binding names; one that is missing from it is missing from that AITER.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atom_patches.kernels
from atom_patches.kernels.aiter_binding import Function, signatures

FOLDER = Path(__file__).parents[1] / "tests" / "kernels" / "aiter_stand_in"


def bound_functions() -> dict[str, list[Function]]:
    """Every function that a provider binds, by family."""
    found: dict[str, list[Function]] = {}
    for family in pkgutil.iter_modules(atom_patches.kernels.__path__):
        name = f"{atom_patches.kernels.__name__}.{family.name}"
        if family.ispkg and (Path(*importlib.import_module(name).__path__) / "aiter_impl.py").is_file():
            module = importlib.import_module(f"{name}.aiter_impl")
            found[family.name] = [value for value in vars(module).values() if isinstance(value, Function)]
    return found


def wanted() -> list[str]:
    """The targets of all bindings, sorted."""
    return sorted({function.target for functions in bound_functions().values() for function in functions})


def from_sources(read: Callable[[str], str | None]) -> dict[str, str]:
    """Signatures of the wanted functions; `read` gives the source of a file by its path below the root."""
    found: dict[str, str] = {}
    for target in wanted():
        module, _, name = target.partition(":")
        path = module.replace(".", "/")
        source = read(f"{path}.py") or read(f"{path}/__init__.py")
        signature = signatures(source).get(name) if source is not None else None
        if signature is not None:
            found[target] = shown(signature)
    return found


def from_record(functions: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Signatures of the wanted functions out of a list of all: name -> [{"module", "args"}]."""
    found: dict[str, str] = {}
    for target in wanted():
        module, _, name = target.partition(":")
        for entry in functions.get(name, []):
            if entry["module"] == module:
                found[target] = shown(_recorded(entry["args"]))
    return found


def _recorded(args: list[str]) -> inspect.Signature:
    by_position = [a for a in args if not a.endswith(" (kw)")]
    by_keyword = [a.removesuffix(" (kw)") for a in args if a.endswith(" (kw)")]
    listed = ", ".join([*by_position, *(["*"] if by_keyword else []), *by_keyword])
    return signatures(f"def f({listed}): ...")["f"]


def shown(signature: inspect.Signature) -> str:
    """A signature as text, without annotations: "(q, k, scale=None, *, eps=1e-06)"."""
    return str(signature)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--version", help="names the file, and the lane of the tests")
    options = parser.parse_args()
    if options.wheel is not None:
        version = options.version or options.wheel.name.split("-")[1]
        with zipfile.ZipFile(options.wheel) as archive:
            names = set(archive.namelist())
            found = from_sources(lambda path: archive.read(path).decode() if path in names else None)
        source = f"amd-aiter {version} on PyPI ({options.wheel.name})"
    elif options.checkout is not None:
        version = options.version
        root: Path = options.checkout
        found = from_sources(lambda path: (root / path).read_text() if (root / path).is_file() else None)
        commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        source = f"ROCm/aiter {commit.stdout.strip()}"
    elif options.recorded is not None:
        version = options.version
        record = json.loads(options.recorded.read_text())
        found, source = from_record(record["functions"]), record["source"]
    else:
        parser.error("one of --wheel, --checkout and --recorded is needed")
    if version is None or not re.fullmatch(r"[\w.-]+", version):
        parser.error("--version is needed")
    path = FOLDER / f"signatures-{version}.json"
    path.write_text(json.dumps({"source": source, "signatures": found}, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(found)} of {len(wanted())} functions")


if __name__ == "__main__":
    main()
