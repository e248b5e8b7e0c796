"""The site's pages outside of docs/, and links that are written for GitHub."""

from __future__ import annotations

import pytest
import site_pages
import yaml


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/pcp.md)", "[a](pcp.md)"),
        ("index.md", "[a](docs/pcp.md#limits)", "[a](pcp.md#limits)"),
        ("index.md", "[a](LICENSE)", "a (`LICENSE`)"),
        ("index.md", "![a](docs/how-it-works.svg)", "![a](how-it-works.svg)"),
        ("pcp.md", "[a](kernels.md) [b](#limits) [c](https://x.org/y.md)", "[a](kernels.md) [b](#limits) [c](https://x.org/y.md)"),
        ("pcp.md", "[a](../README.md#limits)", "[a](index.md#limits)"),
        ("pcp.md", "[a](../benchmarks/startup-2026-11-29.md)", "[a](benchmarks/startup-2026-11-29.md)"),
        ("kernels.md", "[x.py](../setup.py)", "x.py (`setup.py`)"),
        ("benchmarks/pcp-h200-2026-11-30.md", "[a](pcp-h200-2026-11-29.md)", "[a](pcp-h200-2026-11-29.md)"),
        ("benchmarks/pcp-h200-2026-11-30.md", "[a](../docs/pcp.md)", "[a](../pcp.md)"),
        ("pcp.md", "[a](nowhere.md)", "[a](nowhere.md)"),
    ],
)  # fmt: skip
def test_links(page: str, text: str, expected: str) -> None:
    assert site_pages.relinked(text, page) == expected


def test_pages_and_files_are_pairs() -> None:
    for file, page in site_pages.outside().items():
        assert (site_pages.ROOT / file).is_file()
        assert site_pages.in_repository(page) == file and site_pages.in_site(file) == page


def test_the_site_loads_nothing_from_elsewhere() -> None:
    found = yaml.safe_load((site_pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert found["theme"]["font"] is False and found["strict"] is True
    assert not {"extra_javascript", "extra_css", "extra"} & set(found)
    assert found["plugins"][1]["mkdocstrings"]["handlers"]["python"]["options"]["allow_inspection"] is False
