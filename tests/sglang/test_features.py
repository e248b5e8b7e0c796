"""The feature matrix in real SGLang: a few of its configurations, and as `long` all of it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import feature_decisions
import feature_matrix
import feature_table
import pytest
from feature_rows import REFUSED, SERVED, STOCK, Case
from features import SGLANG as ENGINE

pytestmark = pytest.mark.skipif(
    metadata.version("sglang") != ENGINE.version, reason=f"the matrix is declared for SGLang {ENGINE.version}"
)
LEFT, STOPPED = Case("llama", ("weight offload",)), Case("deepseek_v32", ("LoRA",))


def test_configurations_are_served_left_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Case("llama"), LEFT, STOPPED]
    monkeypatch.setattr(feature_decisions, "cases", lambda _: few)
    found = feature_decisions.decide(ENGINE, tmp_path / "decisions", {})
    assert [found[case].state for case in few] == [SERVED, STOCK, REFUSED], found
    assert "--cpu-offload-gb" in found[LEFT].detail
    assert "--enable-lora" in found[STOPPED].detail


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_the_whole_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_table, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(feature_matrix, "LOGS", tmp_path / "logs")
    lines = list(feature_matrix.lines(ENGINE, feature_matrix.renew(ENGINE)))
    print(*lines, sep="\n")
    assert not [line for line in lines if line.startswith("FAULT")]
