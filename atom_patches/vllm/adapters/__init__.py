"""What the vLLM patches call. Unlike the declarations beside it, this package may import torch and vLLM."""
