"""The operator `gdn_decode`."""

from __future__ import annotations

OPERATIONS = ()
