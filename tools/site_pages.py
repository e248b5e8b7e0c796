"""A hook of MkDocs: pages that lie outside of docs/, links that point there, and the changes that wait in changelog.d/.

GitHub and the site show the same files. README.md is the site's first page, the other files of `PAGES` and the figures
of benchmarks/ are pages too, and links between them are written as GitHub wants them, from file to file. What is linked
to and is no page, such as a source file or raw figures, is named instead. Anything else stays as it is, and fails the
build.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "benchmarks/README.md": "benchmarks/index.md",
}
"""Files of the repository and the names under which the site has them."""

RELEASES = "<!-- towncrier: releases follow -->\n"
"""A line of CHANGELOG.md, as pyproject.toml has it: what is not released yet belongs below it."""

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def outside() -> dict[str, str]:
    """Every page that lies outside of docs/: its file in the repository, and its name in the site."""
    figures = {f"benchmarks/{path.name}": f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")}
    return figures | PAGES


def in_site(file: str) -> str | None:
    """The name under which the site has a file of the repository, if it has it."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/") if (ROOT / file).is_file() else None
    return outside().get(file)


def in_repository(page: str) -> str:
    """The file of a page of the site."""
    return next((file for file, name in outside().items() if name == page), f"docs/{page}")


def relinked(text: str, page: str) -> str:
    """`text` of a page, with its links leading to pages of the site, or naming the file that is none."""
    folder, here = posixpath.dirname(in_repository(page)), posixpath.dirname(page)

    def link(found: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, found["path"]))
        name = in_site(file)
        if name is not None:
            return f"[{found['text']}]({posixpath.relpath(name, here or '.')}{found['anchor'] or ''})"
        if (ROOT / file).exists():
            return found["text"] if found["text"] == file else f"{found['text']} (`{file}`)"
        return found[0]

    return LINK.sub(link, text)


def on_config(config: Any) -> Any:
    """MkDocs has read mkdocs.yml: figures are listed, newest first."""
    figures = sorted((name for name in outside().values() if name.startswith("benchmarks/")), key=_date, reverse=True)
    for section in config.nav:
        if "Measured" in section:
            section["Measured"] = figures
    return config


def _date(name: str) -> str:
    """The date in a file's name; the overview, which has none, comes first."""
    found = re.search(r"\d{4}-\d\d-\d\d", name)
    return found[0] if found else "9999"


def on_files(files: Files, config: Any) -> Files:
    """MkDocs asks which files there are."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for file, name in outside().items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs hands over a page's text."""
    name = page.file.src_uri
    if name == PAGES["CHANGELOG.md"]:
        before, line, after = markdown.partition(RELEASES)
        markdown = f"{before}{unreleased()}\n{after}" if line else markdown
    return relinked(markdown, name)


def unreleased() -> str:
    """What the next release's section will say."""
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "Unreleased"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"changelog.d cannot be read: {ran.stderr}")
    return ran.stdout
