"""Sparse latent attention (DeepSeek-V3.2) on this package's kernels, in place of SGLang's own."""
