"""The ATOM decoders built of vLLM's layers: its attention, linear layers, experts, caches and weight loaders."""
