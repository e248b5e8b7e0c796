"""Depthwise causal convolution over time, with the last W - 1 inputs of each sequence kept as its state.

For one sequence, one channel, a filter of W taps and inputs x_t (x_t for t < 0: the state, or 0 without one):

    y_t = activation(bias + sum_{j<W} weight[j] * x_{t-W+1+j})

Schema, T tokens in N sequences, D channels, W >= 2 taps, S state slots:

    x            [T, D]          floating
    weight       [D, W]          floating; weight[:, W-1] multiplies the newest input
    bias         [D] or None
    state        [S, D, W - 1]   floating, oldest input first; updated in place
    slots        [N] integers    the state of each sequence; negative entries and `null_slot` are padding
    output       [T, D]          in x's dtype

Any strides are admitted. The sum is taken in float32. Padding rows and sequences give 0 and touch no state.
"""

from __future__ import annotations

from .reference import causal_conv1d, causal_conv1d_update

#: Largest (relative, absolute) difference from a float64 sum, per input dtype.
TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (1e-2, 1e-2), "float16": (2e-3, 2e-3)}

__all__ = ["TOLERANCE", "causal_conv1d", "causal_conv1d_update"]
