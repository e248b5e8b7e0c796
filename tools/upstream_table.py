"""Keep docs/upstream.md equal to the declarations: what would make each patch unnecessary.

python tools/upstream_table.py            # print the table
python tools/upstream_table.py --write    # put it into docs/upstream.md
python tools/upstream_table.py --check    # exit status 1 if docs/upstream.md says otherwise
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from generated import Part  # noqa: E402

from atom_patches.core import Patch, discovery  # noqa: E402

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
REFERENCE = re.compile(r"\b([\w.-]+/[\w.-]+)#(\d+)")
NEVER = "none: "


def table() -> str:
    """One table an engine in Markdown: patches, the change that would retire them, when they go."""
    parts: list[str] = []
    for name, title in ENGINES.items():
        engine = importlib.import_module(f"atom_patches.{name}.engine").ENGINE
        parts += [f"### {title}", "", *_rows(sorted(discovery.load(engine), key=lambda patch: patch.id)), ""]
    return "\n".join(parts).rstrip("\n")


def _rows(patches: list[Patch]) -> Iterator[str]:
    yield "| patch | upstream | goes when |"
    yield "|---|---|---|"
    for patch in patches:
        upstream = REFERENCE.sub(r"[\g<0>](https://github.com/\1/issues/\2)", patch.upstream)
        if patch.upstreamed is not None:
            upstream += "; a probe finds it"
        yield f"| `{patch.id}` | {upstream} | {removal(patch)} |"


def removal(patch: Patch) -> str:
    """What a patch's file says after `Remove when:`."""
    engine, _, rest = patch.id.partition(".")
    text = importlib.import_module(f"atom_patches.{engine}.{rest}").__doc__ or ""
    return " ".join(text.partition("Remove when:")[2].split()).rstrip(".")


PART = Part(ROOT / "docs" / "upstream.md", "upstream_table", table)


if __name__ == "__main__":
    sys.exit(PART.main(__doc__))
