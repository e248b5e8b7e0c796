"""Whether AITER, AMD's kernel library, can be called in this process."""

from __future__ import annotations

import importlib.util

import torch

from atom_patches.kernels.registry import YES, Verdict, no


def available(device_type: str) -> Verdict:
    """Whether tensors on `device_type` can be handed to AITER; AITER is not imported."""
    if device_type != "cuda" or torch.version.hip is None:
        return no("AITER runs on ROCm only")
    if importlib.util.find_spec("aiter") is None:
        return no("the package aiter is not installed")
    return YES
