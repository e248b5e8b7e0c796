"""What holds for every test: an offline, single-threaded, unarmed process; cheap tests first; the checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from atom_patches import arming

# Tests import parts of the package, which arms it and would arm every process that a test starts. A test that
# wants an armed process asks for one.
arming.disarm()

os.environ.update(
    # Nothing may be looked up, or reported, outside this machine.
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    # One thread a process: engines of several ranks share the machine's few cores.
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
)

# Engines of other tests may keep the machine busy: how long an example takes says nothing.
hypothesis.settings.register_profile(
    "no deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no deadline")

TESTS = Path(__file__).parent
# A fault in the patch engine fails within seconds, before the first inference engine starts.
ORDER = ("unit", "ordering", "drift", "kernels", "models", "startup", "vllm", "sglang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], Path]:
    """The directory of a checkpoint of tools/checkpoints.py, by name; made on first use, kept outside the checkout."""
    import checkpoints

    return checkpoints.checkpoint


@pytest.fixture(scope="session")
def recall_model() -> Path:
    """The shipped model on which lost context shows as a wrong token (tools/train_recall.py)."""
    return TESTS / "assets" / "recall"
