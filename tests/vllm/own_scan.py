"""Make split steps scan rows of their own with `gdn_prefill`, as on a GPU; its reference serves it here."""

from __future__ import annotations

from typing import Any

calls: dict[str, int] = {}


class Counted:
    """An operation that counts its calls."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def __call__(self, *arguments: Any) -> Any:
        calls[self.name] = calls.get(self.name, 0) + 1
        return self._operation(*arguments)


def install() -> None:
    """Let the reference count as one of the package's kernels, and count its calls."""
    from atom_patches.vllm.adapters.pcp_gdn import own_rows

    own_rows.NOT_OURS = ("engine",)  # type: ignore[assignment]
    own_rows.GDN_PREFILL = Counted(own_rows.GDN_PREFILL)  # type: ignore[assignment]


def report() -> dict[str, int]:
    """Calls by operation."""
    return dict(calls)
