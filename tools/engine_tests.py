"""Run an engine's own unit tests twice, as they are and with every patch in its place: no test may tell the two apart.

    python tools/engine_tests.py vllm-0.20.2

The tests come with the release's source distribution, which is fetched once; wheels have none. SGLang's releases have
no source distribution, and the tests in its wheels are for accelerators. Chosen are the tests of what is patched that
run without a GPU and without a checkpoint; of the two models whose sizes they read, only a configuration is provided.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import lanes
from lanes import Lane
from toolcache import ROOT, cache_root, locked

ARCHIVES = {
    "vllm-0.20.2": "58809377798c5335c6e2fe30092abda54d9200b5b8a717b3735a63f5daa0e383",
    "vllm-0.27.1": "eec2d54d137ac1e59cb4c39226dfee1943eefc8f4788f5821d7300d6acbdb646",
    "vllm-0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "vllm-0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
"""SHA-256 of each release's source distribution."""

CHOSEN = (
    "tests/v1/core",
    "tests/v1/attention/test_attention_splitting.py",
    "tests/v1/attention/test_gdn_metadata_builder.py",
    "tests/v1/cudagraph/test_cudagraph_dispatch.py",
    "tests/v1/engine/test_engine_args.py",
    "tests/v1/engine/test_output_processor.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "tests/v1/metrics",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    "tests/v1/streaming_input",
    "tests/v1/worker/test_gpu_input_batch.py",
    "tests/engine/test_arg_utils.py",
    "tests/test_ray_env_utils.py",
)
IGNORED = ("*_e2e.py", "*_random.py", "*_runner_*.py")
"""Patterns of files that start an engine, or need a GPU."""

CONFIGURATIONS = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048, "vocab_size": 50272,
        "word_embed_proj_dim": 768, "do_layer_norm_before": True, "torch_dtype": "float16",
    },
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1000000,
        "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


class Result(NamedTuple):
    """What the tests say of one release."""

    passed: int
    called: tuple[str, ...]
    different: tuple[str, ...]

    def __str__(self) -> str:
        told = f"{self.passed} of its own tests pass with the patches in place, which call {len(self.called)} of them"
        return f"{told}; {len(self.different)} pass only without"


def run(lane: Lane) -> Result:
    """Run the release's tests with and without the patches.

    Raises:
        SystemExit: the tests cannot be fetched or run.
    """
    folder = tests(lane)
    stock, _ = _outcomes(lane, folder)
    patched, calls = _outcomes(lane, folder, "--patches", lane.engine)
    lost = [test for test, outcome in stock.items() if outcome == "passed" and patched.get(test) != "passed"]
    if lost:  # a test that fails by chance passes now
        again, _ = _outcomes(lane, folder, "--patches", lane.engine, chosen=lost)
        lost = [test for test in lost if again.get(test) != "passed"]
    passed = sum(outcome == "passed" for test, outcome in patched.items() if stock.get(test) == "passed")
    return Result(passed, tuple(sorted(patch for patch, count in calls.items() if count)), tuple(lost))


def tests(lane: Lane) -> Path:
    """A folder with the release's `tests`.

    Raises:
        SystemExit: the archive could not be fetched, or is another one.
    """
    folder = cache_root() / "sources" / f"{lane.name}-tests"
    with locked(folder.with_name(folder.name + ".lock")):
        if not folder.exists():
            _fetch(lane, folder)
    return folder


def _fetch(lane: Lane, folder: Path) -> None:
    # pip would run the distribution's setup to download it; what it calls the default index is where releases are.
    from pip._internal.models.index import PyPI

    name = f"{lane.engine}-{lane.version}.tar.gz"
    wanted = {"Accept": "application/vnd.pypi.simple.v1+json"}
    page = urllib.request.Request(f"{PyPI.simple_url}/{lane.engine}/", headers=wanted)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with urllib.request.urlopen(page, timeout=60) as answer:
            found = {file["filename"]: file["url"] for file in json.load(answer)["files"]}
        with urllib.request.urlopen(found[name], timeout=600) as answer:
            content: bytes = answer.read()
        if hashlib.sha256(content).hexdigest() != ARCHIVES[lane.name]:
            raise SystemExit(f"engine tests: {name} is not the archive that was reviewed")
        archive = Path(scratch) / name
        archive.write_bytes(content)
        top = f"{lane.engine}-{lane.version}"
        with tarfile.open(archive) as opened:
            kept = [one for one in opened if one.name.startswith((f"{top}/tests/", f"{top}/pyproject.toml"))]
            opened.extractall(scratch, kept, filter="data")
        _write_configurations(Path(scratch) / top / "hub")
        (Path(scratch) / top).rename(folder)


def _write_configurations(hub: Path) -> None:
    for name, settings in CONFIGURATIONS.items():
        model = hub / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / "local"
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("local", encoding="utf-8")
        (snapshot / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def _outcomes(
    lane: Lane, folder: Path, *options: str, chosen: list[str] | None = None
) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """The outcome of every test, and how often each patch's function was called."""
    files = chosen or [file for file in CHOSEN if (folder / file).exists()]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("ATOM_", "VLLM_"))}
    given = outside | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(ROOT / "tests")]),
    }
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes.json"
        command = [
            str(lanes.environment(lane)), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "in_place",
            "--noconftest", "--continue-on-collection-errors", "--timeout", "60", "--outcomes", str(outcomes),
            *options, *(f"--ignore-glob={pattern}" for pattern in IGNORED), *files,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
        if not outcomes.exists():
            told = f"{done.stdout[-3000:]}{done.stderr[-1000:]}"
            raise SystemExit(f"engine tests: {lane.name}: pytest did not end:\n{told}")
        found = json.loads(outcomes.read_text(encoding="utf-8"))
    return found["outcomes"], found["calls"]


def main() -> int:
    known = {lane.name: lane for lane in lanes.LANES if lane.name in ARCHIVES}
    if sys.argv[1:] and sys.argv[1] not in known or len(sys.argv) > 2:
        raise SystemExit(f"engine tests: name one of {', '.join(known)}, or none for all")
    failed = False
    for lane in [known[name] for name in sys.argv[1:]] or known.values():
        result = run(lane)
        print(f"{lane.name}: {result}", *result.different, sep="\n  ", flush=True)
        failed = failed or bool(result.different) or not result.called
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
