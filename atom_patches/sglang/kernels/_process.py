"""What a process of SGLang's has set up before a kernel runs, for a process that only measures."""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from atom_patches.kernels.registry import YES, Verdict


def available() -> Verdict:
    """Publish default server arguments, which some kernels ask, unless a server has published its own."""
    context = get_context()
    try:
        context.config_bag("exec")
    except ValueError:  # nothing was published
        context.set_server_args(ServerArgs(model_path="dummy"))
    return YES
