"""ATOM decoders in place of SGLang's own."""
