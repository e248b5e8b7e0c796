"""What a running softmax in powers of two is started with, and what it ends in."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (types that exist only while Triton compiles)
from __future__ import annotations

from triton.experimental.gluon import language as gl

from atom_patches.kernels.gluon_assembler import gluon_jit

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)
"""Stands for the top of no scores: finite, so that no difference of two is NaN."""


@gluon_jit
def log_sum_exp(top, total):
    """Natural, of a sum of powers of two above `top`; of nothing, minus infinity."""
    some = total > 0.0
    return gl.where(some, (top + gl.log2(gl.where(some, total, 1.0))) * LN2, float("-inf"))
