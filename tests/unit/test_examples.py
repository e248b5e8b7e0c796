"""The examples: they are listed and documented, their promises are checked, and what cannot run here can be read."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_examples
import yaml

ROOT = run_examples.ROOT
DOCKER = sorted((run_examples.FOLDER / "docker").glob("Dockerfile.*"))
KUBERNETES = run_examples.FOLDER / "kubernetes" / "pcp-tp-ray.yaml"


def test_all_examples_are_run_and_documented() -> None:
    listed = {example.file for example in run_examples.EXAMPLES}
    scripts = {path.name for path in run_examples.FOLDER.glob("*.py")} | {"own_package/run.py"}
    assert scripts - listed == {"serving.py", "serving_benchmark.py", "accuracy.py"}
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    names = listed | {path.suffix for path in DOCKER}
    assert [name for name in names if f"{name}`" not in page] == []


@pytest.mark.parametrize("example", run_examples.EXAMPLES, ids=lambda example: example.file)
def test_each_says_what_it_prints(example: run_examples.Example) -> None:
    assert len(run_examples.promised((run_examples.FOLDER / example.file).read_text(encoding="utf-8"))) > 1


def test_a_patch_of_your_own_does_what_it_says() -> None:
    assert run_examples.run(run_examples.Example("own_package/run.py")) == ""


@pytest.mark.parametrize(
    ("expected", "printed", "wrong"),
    [
        (["a", "b"], ["a", "b"], ""),
        (["a … c", "…"], ["a b c", "d", "e"], ""),
        (["a", "…"], ["a"], ""),
        (["[a]* …"], ["[a]* b"], ""),
        (["[a]"], ["a"], "line 1 is"),
        (["a", "b"], ["a"], "line 2 is missing: b"),
        (["a"], ["a", "b"], "one line more: b"),
        (["…", "a"], ["b", "a"], "may only be the last line"),
    ],
)
def test_promises_are_compared_line_by_line(expected: list[str], printed: list[str], wrong: str) -> None:
    found = run_examples.difference(expected, printed)
    assert wrong in found and bool(wrong) == bool(found)


@pytest.mark.parametrize("script", ["accuracy.py", "serving_benchmark.py"])
def test_scripts_for_a_running_server_explain_themselves(script: str) -> None:
    command = [sys.executable, str(run_examples.FOLDER / script), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--model" in ran.stdout


# Images

INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"}


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name, rest.strip()


@pytest.mark.parametrize("path", DOCKER, ids=lambda path: path.name)
def test_images_are_made_of_what_is_there(path: Path) -> None:
    found = list(instructions(path))
    names = [name for name, _ in found]
    assert set(names) <= INSTRUCTIONS
    assert names[0] in ("FROM", "ARG") and names.count("FROM") == 1
    for name, rest in found:
        if name == "COPY":
            *sources, _ = shlex.split(rest)
            assert [source for source in sources if not (ROOT / source).exists()] == []
        elif name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
        elif name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest]).returncode == 0
    copied = {source for name, rest in found if name == "COPY" for source in shlex.split(rest)[:-1]}
    assert copied >= {"setup.py", "atom_patches", "atom_patches.pth", "atom_patches_boot.py"} or copied == {"."}


def test_an_image_gets_what_a_clone_has() -> None:
    """`COPY . .` takes everything else along, environments with this machine's paths included."""
    left_out = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert {name.rstrip("/") for name in ignored if not name.startswith(("_", "*.py"))} <= left_out
    assert "**/__pycache__" in left_out


# Several nodes


# What KubeRay's RayJob (ray.io/v1) has, of what the manifest uses.
JOB = {"entrypoint", "runtimeEnvYAML", "rayClusterSpec"}
CLUSTER = {"headGroupSpec", "workerGroupSpecs"}
HEAD = {"rayStartParams", "template"}
WORKERS = HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


def test_the_manifest_has_the_names_that_kuberay_knows() -> None:
    job, _ = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    found = [job["spec"], cluster, cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert [set(one) for one in found] == [JOB, CLUSTER, HEAD, *[WORKERS] * len(cluster["workerGroupSpecs"])]
    groups = found[2:]
    assert all(isinstance(value, str) for one in groups for value in one["rayStartParams"].values())


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = document["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_manifest_asks_for_as_many_gpus_as_the_command_has_ranks() -> None:
    job, service = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = job["spec"]["entrypoint"].split()
    ranks = 1
    for option in ("--tensor-parallel-size", "--prefill-context-parallel-size"):
        ranks *= int(words[words.index(option) + 1])
    replicas = [1, *(group["replicas"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"])]
    gpus = [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods(job)]
    assert ranks == sum(count * number for count, number in zip(gpus, replicas, strict=True))
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert variables == {"VLLM_PLUGINS": "atom", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"}


def test_the_manifest_fits_together() -> None:
    job, service = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    for pod in pods(job):
        mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {one["image"] for one in pod["containers"]} == {"atom-patches:cuda"}
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    port = job["spec"]["entrypoint"].split()[job["spec"]["entrypoint"].split().index("--port") + 1]
    assert [one["targetPort"] for one in service["spec"]["ports"]] == [int(port)]
    assert int(port) in {one["containerPort"] for one in head["spec"]["containers"][0]["ports"]}


# Workflows


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_can_be_read_and_may_only_read(path: Path) -> None:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["permissions"]["contents"] == "read"
    for job in found["jobs"].values():
        assert job["runs-on"] and all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_machines_of_our_own_are_used_by_label_alone() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["cpu"]["steps"][-1]["run"] == ".ci/run"
    for name, job in jobs.items():
        if "self-hosted" in job["runs-on"]:
            assert f"labels.*.name, '{name}'" in job["if"]
