"""What SGLang's patches share: the ATOM decoders built of SGLang's parts, and the life of one step through them."""
