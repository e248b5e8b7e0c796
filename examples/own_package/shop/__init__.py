"""Somebody else's package, which you run and do not want to fork."""

__version__ = "2.1"
