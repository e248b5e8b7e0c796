"""The table of environment variables: values, names, and what a person is told about mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atom_patches.core import settings

FEATURES = ("vllm.pcp", "vllm.gdn_cpu")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ATOM", "VLLM_PCP")):
            monkeypatch.delenv(name)


def test_defaults_when_the_environment_says_nothing() -> None:
    assert settings.master() == ""
    assert settings.feature("vllm.pcp") == "auto"
    assert settings.strict() is False
    assert settings.pcp_debug() is False
    assert settings.state_dir() is None


@pytest.mark.parametrize(
    ("values", "traced"),
    [
        ({"VLLM_PCP_DEBUG": "1"}, True),
        ({"VLLM_PCP_DEBUG": "0"}, False),
        ({"VLLM_PCP_DEBUG": "1", "ATOM_PCP_DEBUG": ""}, True),
        ({"VLLM_PCP_DEBUG": "1", "ATOM_PCP_DEBUG": "0"}, False),
        ({"VLLM_PCP_DEBUG": "0", "ATOM_PCP_DEBUG": "1"}, True),
    ],
)
def test_the_older_name_of_the_trace_counts_where_the_newer_is_not_set(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], traced: bool
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert settings.pcp_debug() is traced


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOM_PATCHES", "ATOM_PATCH_VLLM_PCP", "ATOM_PATCHES_STRICT", "ATOM_PATCHES_STATE_DIR"):
        monkeypatch.setenv(name, "")
    test_defaults_when_the_environment_says_nothing()


def test_values_are_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCH_VLLM_PCP", "1")
    assert settings.feature("vllm.pcp") == "1"
    monkeypatch.setenv("ATOM_PATCH_VLLM_PCP", "0")
    assert settings.feature("vllm.pcp") == "0"
    assert settings.feature("vllm.gdn_cpu") == "auto"


@pytest.mark.parametrize(
    ("feature", "variable"),
    [("vllm.pcp", "ATOM_PATCH_VLLM_PCP"), ("vllm.cpu.gated_delta_net", "ATOM_PATCH_VLLM_CPU_GATED_DELTA_NET")],
)
def test_feature_variable(feature: str, variable: str) -> None:
    assert settings.feature_variable(feature) == variable


@pytest.mark.parametrize(
    ("name", "value", "read", "allowed"),
    [
        ("ATOM_PATCHES", "yes", settings.master, "0, 1"),
        ("ATOM_PATCHES", "auto", settings.master, "0, 1"),
        ("ATOM_PATCH_VLLM_PCP", "on", lambda: settings.feature("vllm.pcp"), "auto, 0, 1"),
        ("ATOM_PATCHES_STRICT", "true", settings.strict, "0, 1"),
        ("ATOM_PCP_DEBUG", "2", settings.pcp_debug, "0, 1"),
        ("ATOM_PATCHES_STATE_DIR", "here", settings.state_dir, "absolute"),
        ("ATOM_PATCHES_ACCEPTED", "mine.json", settings.accepted_file, "absolute"),
    ],
)
def test_an_invalid_value_names_option_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], object], allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(settings.SettingsError) as error:
        read()
    assert name in str(error.value)
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)
    assert settings.invalid_values(FEATURES) == [str(error.value)]


def test_unknown_names_come_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCH_VLLM_PPC", "1")
    monkeypatch.setenv("ATOM_PATCHES_STRIKT", "1")
    messages = settings.unknown_names(FEATURES)
    assert len(messages) == 2
    assert "ATOM_PATCHES_STRIKT" in messages[0] and "did you mean ATOM_PATCHES_STRICT?" in messages[0]
    assert "ATOM_PATCH_VLLM_PPC" in messages[1] and "did you mean ATOM_PATCH_VLLM_PCP?" in messages[1]


def test_an_unknown_name_that_resembles_nothing_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_KERNEL_0123456789_0123456789", "1")
    (message,) = settings.unknown_names(FEATURES)
    assert "ATOM_KERNEL_0123456789_0123456789" in message and "did you mean" not in message


def test_a_misspelt_prefix_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PTACHES", "1")
    (message,) = settings.unknown_names(FEATURES)
    assert "did you mean ATOM_PATCHES?" in message


@pytest.mark.parametrize(
    "name",
    [
        "ATOM_DISABLE_VLLM_PLUGIN",
        "ATOM_PCP_MOE_MERGE",
        "ATOM_USE_TRITON_MOE",
        "ATOM_MLA_PAGE_SIZE",
        "ATOM_TBO_MODE",
        "ATOM_ENABLE_ALLREDUCE_RMSNORM_FUSION",
        "ATOM_DUAL_STREAM_MOE_TOKEN_THRESHOLD",
        "ATOMIC_COUNTER",
    ],
)
def test_names_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "whatever")
    assert settings.unknown_names(FEATURES) == []
    assert settings.invalid_values(FEATURES) == []


def test_every_declared_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.TABLE:
        name = setting.name.replace(settings.FEATURE, "VLLM_PCP").replace(settings.FAMILY, "RMS_NORM")
        monkeypatch.setenv(name, "")
    assert settings.unknown_names(FEATURES) == []


def test_every_declared_variable_is_read_somewhere() -> None:
    """A variable that nothing reads would promise what nobody keeps."""
    package = Path(settings.__file__).parent.parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.name != "settings.py"]
    accessors = {
        "ATOM_PATCHES": "settings.master(",
        "ATOM_PATCH_<FEATURE>": "settings.feature(",
        "ATOM_PATCHES_STRICT": "settings.strict(",
        "ATOM_PATCHES_STATE_DIR": "settings.state_dir(",
        "ATOM_PATCHES_ACCEPTED": "settings.accepted_file(",
        "ATOM_LOG_LEVEL": "settings.log_level(",
        "ATOM_PCP_GDN": "settings.pcp_gdn(",
        "ATOM_PCP_MOE": "settings.pcp_moe(",
        "VLLM_PCP_DEBUG": "settings.pcp_debug(",
        "ATOM_PCP_ATTENTION": "settings.pcp_attention(",
        "ATOM_PCP_MIN_ROWS": "settings.pcp_min_rows(",
        "ATOM_PCP_DEBUG": "settings.pcp_debug(",
        "ATOM_MODELS": "settings.model_families(",
        "ATOM_FUSIONS": "settings.fusions(",
        "ATOM_ATTENTION": "settings.attention(",
        "ATOM_SPARSE_MLA": "settings.sparse_mla(",
        "ATOM_SPARSE_MLA_MIB": "settings.sparse_mla_workspace_mib(",
        "ATOM_KERNELS": "settings.kernel_providers(",
        "ATOM_KERNEL_<FAMILY>": "settings.kernel_providers(",
    }
    assert set(accessors) == {setting.name for setting in settings.TABLE}
    unread = {name for name, call in accessors.items() if not any(call in source for source in sources)}
    assert unread == set()


def test_accepted_file_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings.accepted_file() == tmp_path / "atom_patches" / "accepted.json"
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "mine.json"))
    assert settings.accepted_file() == tmp_path / "mine.json"


@pytest.mark.parametrize(
    ("environment", "variable", "providers"),
    [
        ({}, "ATOM_KERNELS", ("auto",)),
        ({"ATOM_KERNELS": "triton, torch"}, "ATOM_KERNELS", ("triton", "torch")),
        ({"ATOM_KERNELS": "aiter", "ATOM_KERNEL_RMS_NORM": "torch"}, "ATOM_KERNEL_RMS_NORM", ("torch",)),
        ({"ATOM_KERNELS": "aiter", "ATOM_KERNEL_L2NORM": "torch"}, "ATOM_KERNELS", ("aiter",)),
    ],
)
def test_kernel_providers(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], variable: str, providers: tuple[str, ...]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert settings.kernel_providers("rms_norm") == (variable, providers)


def test_a_misspelt_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_KERNEL_RMS_NORM", "triton,tritn")
    with pytest.raises(settings.SettingsError, match="ATOM_KERNEL_RMS_NORM='triton,tritn' names 'tritn'"):
        settings.kernel_providers("rms_norm")
    assert len(settings.invalid_values(FEATURES)) == 1


def test_a_misspelt_kernel_family_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_KERNEL_RMSNORM", "triton")
    (message,) = settings.unknown_names(FEATURES)
    assert "did you mean ATOM_KERNEL_RMS_NORM?" in message


@pytest.mark.parametrize(
    ("value", "families"),
    [("", set()), ("0", set()), ("1", set(settings.MODEL_FAMILIES)), ("qwen3_next", {"qwen3_next"})],
)
def test_families_asked_for(monkeypatch: pytest.MonkeyPatch, value: str, families: set[str]) -> None:
    monkeypatch.setenv("ATOM_MODELS", value)
    assert settings.model_families() == families


@pytest.mark.parametrize(
    ("value", "kept"),
    [("", set(settings.FUSIONS)), ("1", set(settings.FUSIONS)), ("experts", {"experts"}), ("0", set())],
)
def test_fusions_are_on_unless_switched_off(monkeypatch: pytest.MonkeyPatch, value: str, kept: set[str]) -> None:
    monkeypatch.setenv("ATOM_FUSIONS", value)
    assert settings.fusions() == kept


def test_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_MODELS", "qwen3_5,gpt2")
    with pytest.raises(settings.SettingsError, match="ATOM_MODELS='qwen3_5,gpt2' names 'gpt2'"):
        settings.model_families()
