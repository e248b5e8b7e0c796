"""A server does not wait for Triton because a batch has another size.

Triton compiles a kernel again when a run-time integer is 1 or a multiple of 16 and was not before, and for each new
value of a meta-parameter. Every kernel is launched here, on meta tensors, with batches of many sizes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("specialisation_worker.py")

#: Names of integers that change with the batch.
OF_THE_BATCH = re.compile(
    r"(num|max)_\w+|null_slot|\w*_?blocks|count|total|rows|tokens|seqs|sequences|requests|pairs|parts|splits|chunks|"
    r"scans|tiles"
)
#: Tiles follow the batch in powers of two or in the steps of a tuned table; a batch's size itself would give more.
MOST_VARIANTS = 16


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """`specialisation_worker.Report`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    done = subprocess.run([sys.executable, WORKER], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_kernel_is_tried(report: dict[str, Any]) -> None:
    assert report["untried"] == [], "specialisation_worker.BATCHED has no batches for these operators"
    assert report["unlaunched"] == [], "no batch of specialisation_worker.BATCHED reaches these kernels"


def test_batches_share_their_binaries(report: dict[str, Any]) -> None:
    assert report["torn"] == {}, "put these arguments into the kernel's do_not_specialize"


def test_batches_need_few_binaries(report: dict[str, Any]) -> None:
    assert {kernel: count for kernel, count in report["variants"].items() if count > MOST_VARIANTS} == {}


def test_no_count_is_specialised(report: dict[str, Any]) -> None:
    """By name, so that a count is found that is the same in all of our batches."""
    counts = {kernel: list(filter(OF_THE_BATCH.fullmatch, names)) for kernel, names in report["specialised"].items()}
    assert {kernel: names for kernel, names in counts.items() if names} == {}
