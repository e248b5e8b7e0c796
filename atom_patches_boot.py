"""What vLLM's and SGLang's plugin loaders call.

With their own plugin variables unset, both engines load every installed plugin. Being installed must not be
the same as being asked for, and importing the package arms it: so the entry points live here, outside the
package, and import it only when `atom` was named or `ATOM_PATCHES=1` is set.
"""

from __future__ import annotations

import os

PLUGIN = "atom"


def _asked_for(allow_list: str) -> bool:
    """Whether `allow_list` (VLLM_PLUGINS, SGLANG_PLUGINS) names this plugin, or the master switch is on."""
    master = os.environ.get("ATOM_PATCHES", "")
    if master == "0":
        return False
    named = [name.strip() for name in os.environ.get(allow_list, "").split(",")]
    return master != "" or PLUGIN in named


def vllm_general_plugin() -> None:
    """Entry point of `vllm.general_plugins`: arm, if asked for."""
    if _asked_for("VLLM_PLUGINS"):
        import atom_patches  # noqa: F401


def vllm_platform_plugin() -> None:
    """Entry point of `vllm.platform_plugins`: arm as early as vLLM allows; never offer a platform."""
    vllm_general_plugin()


def sglang_plugin() -> None:
    """Entry point of `sglang.srt.plugins`: arm, if asked for.

    SGLang logs what a plugin raises and goes on. It was asked to run with this one, so what cannot be armed ends the
    process instead: `SystemExit` is no `Exception`.
    """
    if not _asked_for("SGLANG_PLUGINS"):
        return
    try:
        import atom_patches  # noqa: F401
    except (ImportError, RuntimeError, ValueError) as error:
        raise SystemExit(f"atom_patches cannot be armed, and stops the launch of sglang: {error}") from error
