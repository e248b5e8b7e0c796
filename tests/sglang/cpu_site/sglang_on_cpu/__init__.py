"""SGLang 0.5.17 on a machine without an accelerator, for tests: real engines, schedulers and gloo groups.

SGLang has a CPU engine of its own, but hybrid models need kernels there that PyPI does not have. So this folder is a
platform plugin, "cpu_stand_in", whose operations SGLang runs as it does on any device that it does not know: through
`forward_native` and Triton, which is interpreted. Each module here makes up for one kind of thing that only a GPU
has. What each mends is looked for by SGLang's modules by name, so it is put in right after the module's import, before
another module has taken the original.

The folder is put on PYTHONPATH and `SGLANG_PLATFORM=cpu_stand_in` is set, by tests/sglang/environment.py; nothing of
the overlay imports it, and where a GPU is found it does nothing.
"""

from __future__ import annotations

import os

PLATFORM = "cpu_stand_in"


def platform_name() -> str | None:
    """What SGLang's plugin loader asks for: the platform's class, as a name; None where it was not asked for."""
    return "sglang_on_cpu.platform.StandInPlatform" if os.environ.get("SGLANG_PLATFORM") == PLATFORM else None


def install() -> None:
    """Ask to be called when the modules that need it are imported; a few microseconds where SGLang is not used."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return
    from sglang_on_cpu import collectives, device, experts, fp8, gdn, interpreter, rows, sparse

    for part in (device, interpreter, collectives, experts, fp8, gdn, rows, sparse):
        part.install()
