"""ATOM decoders in place of vLLM's own."""
