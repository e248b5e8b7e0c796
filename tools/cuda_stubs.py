"""Stand-ins for the CUDA libraries that a CUDA build of torch links but a CPU run never calls.

The loader wants every library that torch's own libraries name, and every symbol that they take from it, under the
version that they ask for. Each stand-in defines exactly those symbols, as functions that return an error code.
Needs gcc and readelf.

    python tools/cuda_stubs.py SITE_PACKAGES
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvjitlink)", re.IGNORECASE)
CUDA_SYMBOL = re.compile(r"p?nccl|nvshmem|nvrtc|nv[jJ]it|cu(da|blas|dnn|fft|rand|sparse|solver|pti|file|[A-Z])")
# Opened by name and only when a GPU is there, so what it needs is not needed.
NEVER_LOADED = "libcaffe2_nvrtc.so"
ERROR_CODE = 999


@dataclasses.dataclass
class Elf:
    """What one shared library asks for and offers."""

    needed: set[str] = dataclasses.field(default_factory=set[str])
    wanted: set[tuple[str, str]] = dataclasses.field(default_factory=set[tuple[str, str]])  # (symbol, version or "")
    defined: set[str] = dataclasses.field(default_factory=set[str])
    version_from: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # version -> library that has it


def _readelf(option: str, path: Path) -> list[str]:
    done = subprocess.run(["readelf", "-W", option, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def read(path: Path) -> Elf:
    elf = Elf()
    for line in _readelf("--dynamic", path):
        if match := re.search(r"\(NEEDED\).*\[(.+)\]", line):
            elf.needed.add(match[1])
    for line in _readelf("--dyn-syms", path):
        fields = line.split()
        if len(fields) < 8 or fields[4] not in ("GLOBAL", "WEAK"):
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] != "UND":
            elf.defined.add(name)
        elif fields[4] == "GLOBAL":
            elf.wanted.add((name, version.lstrip("@")))
    library = ""
    for line in _readelf("--version-info", path):
        if match := re.search(r"Version: \d+\s+File: (\S+)", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            elf.version_from.setdefault(match[1], library)
    return elf


def plan(site_packages: Path) -> dict[str, dict[str, set[str]]]:
    """For each missing library, its symbols by version ("" for those that ask for none)."""
    own = [p for p in (site_packages / "torch" / "lib").glob("*.so*") if p.name != NEVER_LOADED]
    own += (site_packages / "torch").glob("_C*.so")
    real = list(site_packages.glob("nvidia/*/lib/*.so*"))
    torch_side, cuda_side = [read(p) for p in own], [read(p) for p in real]
    present = {p.name for p in own + real}
    defined = set[str]().union(*(e.defined for e in torch_side + cuda_side))
    needed = set[str]().union(*(e.needed for e in torch_side))
    version_from = {version: lib for e in torch_side for version, lib in e.version_from.items()}

    missing = sorted(name for name in needed - present if CUDA_LIBRARY.match(name))
    stubs: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for symbol, version in set[tuple[str, str]]().union(*(e.wanted for e in torch_side)):
        if symbol in defined or not missing:
            continue
        if version:
            if (library := version_from.get(version)) in stubs:
                stubs[library][version].add(symbol)
        elif CUDA_SYMBOL.match(symbol):
            # Which library should have it is not recorded; the loader takes it from any.
            stubs[missing[0]][""].add(symbol)
    return stubs


def build(library: Path, versions: dict[str, set[str]]) -> None:
    symbols = sorted(set[str]().union(*versions.values()))
    source = "".join(f"int {name}(void) {{ return {ERROR_CODE}; }}\n" for name in symbols) or "int atom_stub;\n"
    script = "".join(f"{v} {{ global: {'; '.join(sorted(names))}; }};\n" for v, names in versions.items() if v)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "stub.c").write_text(source)
        command = ["gcc", "-w", "-shared", "-fPIC", "-o", str(library), "stub.c", f"-Wl,-soname,{library.name}"]
        if script:
            (Path(scratch) / "stub.map").write_text(script)
            command.append("-Wl,--version-script=stub.map")
        subprocess.run(command, cwd=scratch, check=True)


def main(site_packages: Path) -> list[str]:
    """Build what is missing under SITE_PACKAGES/torch/lib; the names of the libraries built."""
    stubs = plan(site_packages)
    for name, versions in stubs.items():
        build(site_packages / "torch" / "lib" / name, versions)
    return list(stubs)


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
