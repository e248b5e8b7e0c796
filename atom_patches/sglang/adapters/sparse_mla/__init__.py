"""DeepSeek-V3.2's sparse attention in SGLang, on SGLang's own pools and this package's kernels."""
