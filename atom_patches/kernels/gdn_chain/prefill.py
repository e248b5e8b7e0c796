"""The operator `gdn_prefill`."""

from __future__ import annotations

OPERATIONS = ()
