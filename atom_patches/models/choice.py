"""Whether a model that an engine is about to load runs on an ATOM decoder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from atom_patches.core import PatchError, Verdict, settings
from atom_patches.core.conditions import refusals
from atom_patches.models.families import ARCHITECTURES

OPTION = "ATOM_MODELS"
IMPL = "atom"
"""The value of --model-impl that requires an ATOM decoder; the engines' own options take any name."""


def decoder_asked(
    engine: str,
    impl: str,
    architecture: Callable[[], str],
    unserved: Callable[[str], Iterable[str]],
    served: Collection[str] = frozenset(ARCHITECTURES),
) -> Verdict:
    """The verdict for one configuration.

    Args:
        engine: the engine's name, as messages give it.
        impl: the value of --model-impl.
        architecture: reads the architecture that the checkpoint names; called only if an answer depends on it.
        unserved: a few words for each setting that the decoder of a family does not serve.
        served: architectures for which the engine has a class here.

    Raises:
        PatchError: the decoder is required, and does not serve the configuration.
    """
    if impl not in ("auto", IMPL):
        return Verdict(False, f"--model-impl is {impl}")
    required = impl == IMPL
    families = frozenset(settings.MODEL_FAMILIES) if required else settings.model_families()
    verdict = _decide(families, architecture, unserved, served)
    if required and not verdict.ok:
        raise PatchError(
            f"--model-impl {IMPL} requires an ATOM decoder, but {verdict.reason}\n"
            f"Change that, or leave the option out, and {engine}'s own model runs"
        )
    return verdict


def _decide(
    families: frozenset[str],
    read_architecture: Callable[[], str],
    unserved: Callable[[str], Iterable[str]],
    served: Collection[str],
) -> Verdict:
    if not families:
        return Verdict(False, f"{OPTION} is 0")
    architecture = read_architecture()
    family = ARCHITECTURES.get(architecture) if architecture in served else None
    if family is None:
        return Verdict(False, f"{architecture} has no ATOM decoder", asked=True)
    if family not in families:
        return Verdict(False, f"{OPTION} does not name {family}")
    found = refusals(unserved(family))
    if found:
        return Verdict(False, f"the ATOM decoder of {architecture} does not serve: {'; '.join(found)}", asked=True)
    return Verdict(True, f"the ATOM decoder of {family}, the family of {architecture}, is asked for")
