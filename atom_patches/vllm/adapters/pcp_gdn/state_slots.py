"""A GatedDeltaNet layer's states, one slot a request, and their transport form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first


class StateSlots:
    """A layer's convolution and recurrent states.

    Args:
        kv_cache: the layer's state tensors, each ``[slots, ...]``.

    Attributes:
        conv: ``[slots, channels, taps - 1]``, oldest first; a view.
        recurrent: ``[slots, heads, V, K]``.
    """

    def __init__(self, kv_cache: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(kv_cache)
        self._slot_bytes = [t[0].numel() * t.element_size() for t in self._tensors]
        conv, self.recurrent = self._tensors
        self.conv = conv if is_conv_state_dim_first() else conv.transpose(1, 2)

    def packed_size(self, slots: int) -> torch.Size:
        """Shape of ``slots`` packed states: bytes of uint8."""
        return torch.Size([slots, sum(self._slot_bytes)])

    def clear(self, slots: torch.Tensor) -> None:
        """Set the states of ``slots`` (int64) to zero."""
        for tensor in self._tensors:
            tensor.index_fill_(0, slots, 0)  # a number that is assigned at places is copied to the device, with a wait

    def pack(self, slots: torch.Tensor) -> torch.Tensor:
        """The states of ``slots`` (int64 ``[n]``) as uint8 ``[n, bytes]``."""
        return torch.cat([t[slots].reshape(len(slots), -1).view(torch.uint8) for t in self._tensors], dim=1)

    def unpack(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Write packed states, uint8 ``[n, bytes]``, to ``slots`` (int64 ``[n]``)."""
        for tensor, part in zip(self._tensors, packed.split(self._slot_bytes, dim=1), strict=True):
            tensor[slots] = part.contiguous().view(tensor.dtype).view(len(slots), *tensor.shape[1:])

    def write(self, slots: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        """Write states to ``slots`` (int64 ``[n]``), rounded to the slots' dtypes.

        Args:
            conv: ``[n, channels, taps - 1]``.
            recurrent: ``[n, heads, V, K]``.
        """
        self.conv[slots] = conv.to(self.conv.dtype)
        self.recurrent[slots] = recurrent.to(self.recurrent.dtype)
