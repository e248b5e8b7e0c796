"""Patches for vLLM: one file per patch in the feature folders; what they call in `adapters`."""
