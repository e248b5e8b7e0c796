"""The seeded faults of tools/mutants.py fit the code, so that a run of them, which is long, does not fail for that."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mutants
import pytest

ROOT = Path(mutants.__file__).parents[1]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits(mutant: mutants.Mutant) -> None:
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    assert mutant.old is None or text.count(mutant.old) == 1
    assert mutant.old is None or mutant.old != mutant.new
    for test in mutant.tests:
        file, _, name = test.partition("::")
        if name:
            assert f"def {name.rpartition('::')[2].partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_no_mutant_is_there_twice() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in mutants.MUTANTS).items() if count > 1] == []
