"""Attention on this package's kernel in place of vLLM's own backends."""
