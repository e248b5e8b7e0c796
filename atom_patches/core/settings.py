"""Every environment variable of atom_patches, in one table.

The table is the only place that knows a variable's name, default and allowed values: the accessors below, the
command line, the unknown-name check and the table in docs/environment.md all read it. Values are read from
`os.environ` at call time, never cached, so that a test or a notebook may change them between two engines.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FeatureSwitch = Literal["auto", "0", "1"]

FEATURE = "<FEATURE>"
FAMILY = "<FAMILY>"

KERNEL_PROVIDERS = ("aiter", "triton", "torch", "engine")

MODEL_FAMILIES = ("deepseek_v3", "deepseek_v32", "llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next")
"""Families that have an ATOM decoder."""

FUSIONS = ("experts", "qk_rope", "kv_cache", "linear")
"""What ATOM decoders run as one kernel, unless they are told not to."""


class SettingsError(ValueError):
    """An environment variable of atom_patches has a value, or a name, that it cannot have."""


@dataclass(frozen=True)
class Setting:
    """One environment variable, or one per feature or kernel family where the name contains `<FEATURE>` or `<FAMILY>`.

    `choices` is empty where any text is allowed; `default` is what an unset or empty variable means, in words
    where no value stands for it.
    """

    name: str
    type: Literal["switch", "choice", "list", "integer", "path"]
    default: str
    choices: tuple[str, ...]
    meaning: str


TABLE: tuple[Setting, ...] = (
    Setting(
        "ATOM_PATCHES",
        "switch",
        "not armed, unless a plugin list names `atom` or the package is imported",
        ("0", "1"),
        "Master switch. `1` arms every Python process that inherits it; `0` keeps everything off, whatever else asks.",
    ),
    Setting(
        f"ATOM_PATCH_{FEATURE}",
        "switch",
        "auto",
        ("auto", "0", "1"),
        "One feature. `auto` applies it when its condition on the engine's configuration holds; `0` keeps it off; "
        "`1` requires it: the launch stops if it is not applied, for whatever reason.",
    ),
    Setting(
        "ATOM_PATCHES_STRICT",
        "switch",
        "0",
        ("0", "1"),
        "`1` turns every warning of the overlay into an error.",
    ),
    Setting(
        "ATOM_PATCHES_STATE_DIR",
        "path",
        "`$XDG_RUNTIME_DIR/atom_patches`, else a directory of the user's own under the temporary directory",
        (),
        "Where each process leaves its state file for `status`. Must be the user's own and closed to others (0700).",
    ),
    Setting(
        "ATOM_PATCHES_ACCEPTED",
        "path",
        "`$XDG_CONFIG_HOME/atom_patches/accepted.json`, else `~/.config/atom_patches/accepted.json`",
        (),
        "The file in which `accept` records the upstream sources that the user has reviewed.",
    ),
    Setting(
        "ATOM_LOG_LEVEL",
        "choice",
        "info",
        ("debug", "info", "warning", "error"),
        "What the overlay logs. `info`: one line when a process is handed a configuration, with what is on, what is "
        "off and why, and warnings; `debug`: also who serves each kernel.",
    ),
    Setting(
        "ATOM_PCP_ATTENTION",
        "choice",
        "auto",
        ("auto", "contiguous", "zigzag"),
        "Which rows a rank answers in full attention of a split prefill. `contiguous`: those that it runs; `zigzag`: a "
        "piece from the front and one from the back, so that all ranks work alike; `auto`: what costs less, by each "
        "step's lengths.",
    ),
    Setting(
        "ATOM_PCP_GDN",
        "choice",
        "auto",
        ("auto", "redundant", "relay", "two_pass", "head_all_to_all"),
        "How GatedDeltaNet layers run a split prefill. `redundant`: every rank gathers the rows and scans all of them; "
        "`relay`: each rank scans its own rows and hands the state to the next; `two_pass`: ranks exchange what their "
        "rows do to any state, then scan at the same time; `head_all_to_all`: each rank scans all rows of its share of "
        "the heads; `auto`: the cheapest of the first three for the step at hand.",
    ),
    Setting(
        "ATOM_PCP_MIN_ROWS",
        "integer",
        "64",
        (),
        "Prefill rows that each rank must get for a step to be split; a smaller step runs whole on every rank.",
    ),
    Setting(
        "ATOM_PCP_MOE",
        "choice",
        "auto",
        ("auto", "shard", "ep", "replicate"),
        "How experts are spread under prefill context parallelism. `shard`: each is cut over all ranks, as vLLM does; "
        "`ep`: whole ones are dealt out over all ranks, which needs `--enable-expert-parallel`; `replicate`: every "
        "context-parallel rank has all of them and runs its own rows, so that nothing is exchanged; `auto`: `ep` with "
        "that option, else `replicate` where all experts fit a GPU (`explain vllm.pcp.moe_parallel`) or their width "
        "cannot be cut, else `shard`.",
    ),
    Setting(
        "ATOM_PCP_DEBUG",
        "switch",
        "0",
        ("0", "1"),
        "`1` traces prefill context parallelism layer by layer: the split, the gathers, the recurrent state.",
    ),
    Setting(
        "VLLM_PCP_DEBUG",
        "switch",
        "0",
        ("0", "1"),
        "The older name of `ATOM_PCP_DEBUG`, for when that is not set.",
    ),
    Setting(
        "ATOM_MODELS",
        "list",
        "0",
        ("0", "1", *MODEL_FAMILIES),
        "Families whose ATOM decoders run instead of the engine's own, separated by commas; `1`: every family that has "
        "one; `0`: none. What a decoder does not serve is left to the engine's own, and a line in the log says why.",
    ),
    Setting(
        "ATOM_FUSIONS",
        "list",
        "1",
        ("0", "1", *FUSIONS),
        "What ATOM decoders run as one kernel, separated by commas. `experts`: the chosen experts and the shared one, "
        "where the engine would run its own Triton kernels; `qk_rope`, in vLLM: norms of queries and keys, and rotary "
        "positions; `kv_cache`, with `qk_rope`: the write to the cache, too; `linear`, on NVIDIA: products of "
        "up to 16 rows with weights as they are stored, of shapes that were measured; `1`: everything; `0`: nothing.",
    ),
    Setting(
        "ATOM_ATTENTION",
        "switch",
        "0",
        ("0", "1"),
        "`1`: in vLLM, layers with keys and values of their own, or with latents, attend on this package's kernels.",
    ),
    Setting(
        "ATOM_SPARSE_MLA",
        "choice",
        "auto",
        ("auto", "0", "1"),
        "Sparse latent attention (DeepSeek-V3.2) in SGLang on this package's kernels: `1`: always; `0`: never; `auto`: "
        "where SGLang's own kernels for it cannot run.",
    ),
    Setting(
        "ATOM_SPARSE_MLA_MIB",
        "integer",
        "512",
        (),
        "MiB that its indexer may use at once while rows select their tokens; more rows are done one part after the "
        "other.",
    ),
    Setting(
        "ATOM_KERNELS",
        "list",
        "auto",
        ("auto", *KERNEL_PROVIDERS),
        "Who computes the kernels' operations: providers to try in order, separated by commas. The call fails if none "
        "of them can serve it; `auto` takes the one that was measured the fastest, and falls back.",
    ),
    Setting(
        f"ATOM_KERNEL_{FAMILY}",
        "list",
        "what `ATOM_KERNELS` says",
        ("auto", *KERNEL_PROVIDERS),
        "The same for one family of operations, such as `ATOM_KERNEL_RMS_NORM`.",
    ),
)

PREFIXES = ("ATOM_PATCH", "ATOM_PCP", "ATOM_KERNEL", "ATOM_SPARSE_MLA")
"""Names that belong to this package: an undeclared one is a mistake worth reporting."""

FOREIGN = frozenset({"ATOM_PCP_MOE_MERGE"})
"""ROCm/ATOM's own variables that happen to begin like ours."""

_BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in TABLE}


def feature_variable(feature: str) -> str:
    """The variable that switches `feature`, a patch's group or id: `vllm.pcp` -> `ATOM_PATCH_VLLM_PCP`."""
    return "ATOM_PATCH_" + re.sub(r"[^A-Za-z0-9]+", "_", feature).upper()


def master() -> Literal["", "0", "1"]:
    """The master switch; empty when the environment says nothing."""
    match _choice(_BY_NAME["ATOM_PATCHES"]):
        case "0":
            return "0"
        case "1":
            return "1"
        case _:
            return ""


def feature(name: str) -> FeatureSwitch:
    """The switch of one feature, named by its patch's group or id."""
    match _choice(_BY_NAME[f"ATOM_PATCH_{FEATURE}"], feature_variable(name)):
        case "0":
            return "0"
        case "1":
            return "1"
        case _:
            return "auto"


def strict() -> bool:
    """Whether warnings are errors."""
    return _choice(_BY_NAME["ATOM_PATCHES_STRICT"]) == "1"


def log_level() -> str | None:
    """The level of the overlay's log, if the environment says one: `debug`, `info`, `warning` or `error`."""
    setting = _BY_NAME["ATOM_LOG_LEVEL"]
    return _choice(setting) if os.environ.get(setting.name) else None


def pcp_attention() -> str:
    """Which rows a rank answers in full attention of a split prefill: `auto`, `contiguous` or `zigzag`."""
    return _choice(_BY_NAME["ATOM_PCP_ATTENTION"])


def pcp_gdn() -> str:
    """How GatedDeltaNet layers run a split prefill: one of its choices in the table, `auto` among them."""
    return _choice(_BY_NAME["ATOM_PCP_GDN"])


def pcp_min_rows() -> int:
    """Prefill rows that each rank must get for a step to be split; at least 1."""
    return int(_choice(_BY_NAME["ATOM_PCP_MIN_ROWS"]))


def pcp_moe() -> str:
    """How experts are spread under prefill context parallelism: `auto`, `shard`, `ep` or `replicate`."""
    return _choice(_BY_NAME["ATOM_PCP_MOE"])


def pcp_debug() -> bool:
    """Whether prefill context parallelism is traced layer by layer."""
    name = "ATOM_PCP_DEBUG" if os.environ.get("ATOM_PCP_DEBUG") else "VLLM_PCP_DEBUG"
    return _choice(_BY_NAME[name]) == "1"


def model_families() -> frozenset[str]:
    """The families whose ATOM decoders are asked for."""
    asked = _items(_choice(_BY_NAME["ATOM_MODELS"]))
    if "1" in asked:
        return frozenset(MODEL_FAMILIES)
    return frozenset(asked) - {"0"}


def fusions() -> frozenset[str]:
    """What ATOM decoders are to run as one kernel."""
    asked = _items(_choice(_BY_NAME["ATOM_FUSIONS"]))
    return frozenset(FUSIONS) if "1" in asked else frozenset(asked) - {"0"}


def attention() -> bool:
    """Whether attention to keys and values, or to latents, is to run on this package's kernels."""
    return _choice(_BY_NAME["ATOM_ATTENTION"]) == "1"


def sparse_mla() -> str:
    """Whether SGLang's sparse latent attention runs on this package's kernels: `auto`, `0` or `1`."""
    return _choice(_BY_NAME["ATOM_SPARSE_MLA"])


def sparse_mla_workspace_mib() -> int:
    """MiB that may be used at once while rows select their tokens."""
    return int(_choice(_BY_NAME["ATOM_SPARSE_MLA_MIB"]))


def kernel_variable(family: str) -> str:
    """The variable that chooses the providers of one family: `rms_norm` -> `ATOM_KERNEL_RMS_NORM`."""
    return "ATOM_KERNEL_" + family.upper()


def kernel_providers(family: str) -> tuple[str, tuple[str, ...]]:
    """The variable that decides about `family`, and the providers that it names, in order."""
    own = kernel_variable(family)
    if os.environ.get(own):
        return own, _items(_choice(_BY_NAME[f"ATOM_KERNEL_{FAMILY}"], own))
    return "ATOM_KERNELS", _items(_choice(_BY_NAME["ATOM_KERNELS"]))


@functools.cache
def kernel_families() -> tuple[str, ...]:
    """The packages below `atom_patches/kernels`, which are not imported."""
    kernels = Path(__file__).parents[1] / "kernels"
    return tuple(sorted(folder.parent.name for folder in kernels.glob("*/__init__.py")))


def value(name: str) -> str:
    """What holds for a declared variable: what the environment says, or its default."""
    return _choice(_BY_NAME[name])


def state_dir() -> Path | None:
    """The directory for state files that the environment asks for, if it asks for one."""
    return _path(_BY_NAME["ATOM_PATCHES_STATE_DIR"])


def accepted_file() -> Path:
    """The user's own file of accepted fingerprints; it need not exist."""
    asked = _path(_BY_NAME["ATOM_PATCHES_ACCEPTED"])
    if asked is not None:
        return asked
    config = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(config) if config else Path.home() / ".config"
    return base / "atom_patches" / "accepted.json"


def invalid_values(features: Iterable[str]) -> list[str]:
    """One message for each declared variable whose value is not allowed."""
    messages: list[str] = []
    for name, setting in _declared(features).items():
        try:
            _check(setting, name, os.environ.get(name, ""))
        except SettingsError as error:
            messages.append(str(error))
    return messages


def unknown_names(features: Iterable[str]) -> list[str]:
    """One message for each variable that looks like ours and is not, naming the nearest known one.

    Names with one of our prefixes are all meant for us. Any other `ATOM…` name belongs to someone else
    (ROCm/ATOM has dozens), unless it is all but identical to one of ours.
    """
    known = list(_declared(features))
    messages: list[str] = []
    for name in sorted(os.environ):
        if not name.startswith("ATOM") or name in known or name in FOREIGN:
            continue
        ours = name.startswith(PREFIXES)
        near = nearest(name, known, cutoff=0.6 if ours else 0.88)
        if near:
            messages.append(f"{name} is not a variable of atom_patches and has no effect; did you mean {near}?")
        elif ours:
            messages.append(f"{name} is not a variable of atom_patches and has no effect; remove it.")
    return messages


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is most like `name`, or None when none is at least `cutoff` alike (0 to 1)."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def _declared(features: Iterable[str]) -> dict[str, Setting]:
    """Every variable that has a meaning, with one entry per feature."""
    names = {name: setting for name, setting in _BY_NAME.items() if "<" not in name}
    per_feature, per_family = _BY_NAME[f"ATOM_PATCH_{FEATURE}"], _BY_NAME[f"ATOM_KERNEL_{FAMILY}"]
    names |= {feature_variable(feature): per_feature for feature in features}
    return names | {kernel_variable(family): per_family for family in kernel_families()}


def _choice(setting: Setting, name: str = "") -> str:
    """The value of a switch, its default when unset or empty; raises SettingsError when it is not allowed."""
    name = name or setting.name
    value = os.environ.get(name, "")
    _check(setting, name, value)
    return value or setting.default


def _items(value: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in value.split(","))


def _path(setting: Setting) -> Path | None:
    value = os.environ.get(setting.name, "")
    _check(setting, setting.name, value)
    return Path(value) if value else None


def _check(setting: Setting, name: str, value: str) -> None:
    if not value:
        return
    allowed = ", ".join(setting.choices)
    if setting.type == "list":
        if unknown := [item for item in _items(value) if item not in setting.choices]:
            raise SettingsError(
                f"{name}={value!r} names {unknown[0]!r}, which is none of its values. Set it to one or more of: "
                f"{allowed}; separated by commas; or unset it."
            )
    elif setting.choices and value not in setting.choices:
        raise SettingsError(f"{name}={value!r} is not allowed. Set it to one of: {allowed}; or unset it.")
    if setting.type == "integer" and not (value.isascii() and value.isdigit() and int(value) > 0):
        raise SettingsError(f"{name}={value!r} is not allowed. Set it to a whole number of at least 1, or unset it.")
    if setting.type == "path" and not os.path.isabs(value):
        raise SettingsError(
            f"{name}={value!r} is a relative path, which each process would resolve from its own working directory. "
            "Give an absolute path."
        )
