"""What is current while a decoder runs: the step's plan, and the recurrent metadata bound to it.

All ranks agree on the plan before any of them enters the decoder. Recurrent metadata are a rank's own business, and are
added later, or not at all on a rank that has none: adding them must neither make a context anew nor ask other ranks.
:func:`bind_gdn` takes the context that is there, replaces that one field, and puts the former one back.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from atom_patches.runtime.gdn import GdnBinding
from atom_patches.runtime.scope import Scope
from atom_patches.runtime.step import StepPlan


@dataclass(frozen=True)
class StepContext:
    """One step, as the layers of a decoder see it.

    Attributes:
        plan: None where recurrent metadata were bound outside of any step.
        gdn: None where no recurrent metadata are bound.
    """

    plan: StepPlan | None = None
    gdn: GdnBinding | None = None


STEP: Scope[StepContext] = Scope("step")


@contextmanager
def step(plan: StepPlan) -> Generator[StepContext, None, None]:
    """Run a step by this plan within the block; nothing of an outer step shows through."""
    with STEP.entered(StepContext(plan)) as context:
        yield context


@contextmanager
def bind_gdn(binding: GdnBinding) -> Generator[StepContext, None, None]:
    """Bind recurrent metadata to the current step within the block, or on their own outside of any."""
    outer = STEP.current() or StepContext()
    with STEP.entered(replace(outer, gdn=binding)) as context:
        yield context


def current_gdn() -> GdnBinding:
    """The recurrent metadata that are bound.

    Raises:
        LookupError: none are.
    """
    context = STEP.current()
    if context is None or context.gdn is None:
        raise LookupError("no recurrent metadata are bound: a GatedDeltaNet layer runs only within `bind_gdn`")
    return context.gdn
