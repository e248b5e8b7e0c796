"""Decoders, independent of any inference engine; `parts` is what an engine provides."""
