"""A stopped launch that nobody catches prints its message, and no traceback."""

from __future__ import annotations

import subprocess
import sys


def run(raising: str) -> subprocess.CompletedProcess[str]:
    script = (
        "import asyncio\n"
        "from atom_patches.core import PatchError, stop\n"
        "async def serve():\n"
        "    stop.print_message_only()\n"
        "    stop.print_message_only()\n"
        f"    raise {raising}\n"
        "print('starting')\n"
        "asyncio.run(serve())\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_message_alone_and_status_one() -> None:
    result = run("PatchError('stops the launch: because') from ValueError('a cause')")
    assert result.returncode == 1
    assert result.stderr == "\nstops the launch: because\n"
    assert result.stdout == "starting\n"


def test_any_other_error_keeps_its_traceback() -> None:
    result = run("RuntimeError('something else')")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "RuntimeError: something else" in result.stderr
