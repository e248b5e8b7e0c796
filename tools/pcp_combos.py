"""Which combinations of model, ranks, case and settings tools/pcp_matrix.py runs, and which must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checkpoints import MANY_GDN, TINY_GDN, TINY_MOE
from pairwise import Row, pairwise

NONE = "none"
"""The setting of layers that a model does not have."""

CPU_EXPERT_TILE = 32
"""vLLM's CPU kernel takes slices of experts of a multiple of this many channels."""


@dataclass(frozen=True)
class Model:
    """A checkpoint of tools/checkpoints.py, as far as settings depend on it; 0 for layers that it does not have."""

    key_heads: int
    expert_width: int


MODELS = {
    "qwen3_next": Model(TINY_GDN["linear_num_key_heads"], TINY_MOE["moe_intermediate_size"]),
    "qwen3_next_heads": Model(MANY_GDN["linear_num_key_heads"], TINY_MOE["moe_intermediate_size"]),
    "qwen3_5": Model(TINY_GDN["linear_num_key_heads"], 0),
    "qwen3_5_moe": Model(TINY_GDN["linear_num_key_heads"], TINY_MOE["moe_intermediate_size"]),
    "qwen3": Model(0, 0),
}
WORLDS = ("2", "3", "4", "6", "8")
CASES = (
    "mixed lengths",
    "chunks",
    "prefill and decode",
    "prefix caching",
    "preemption",
    "aborts",
    "one token",
    "log-probabilities",
    "seeded n=2",
    "penalties",
)
GDN = ("auto", "redundant", "relay", "two_pass", "head_all_to_all", NONE)
ATTENTION = ("contiguous", "zigzag")
MOE = ("shard", "replicate", "ep", NONE)
FACTORS = {"model": tuple(MODELS), "ranks": WORLDS, "case": CASES, "gdn": GDN, "attention": ATTENTION, "moe": MOE}


@dataclass(frozen=True)
class Combo:
    """One row of the matrix; fields in the order of FACTORS."""

    model: str
    ranks: str
    case: str
    gdn: str
    attention: str
    moe: str

    def __str__(self) -> str:
        return f"{self.model} on {self.ranks} ranks, {self.case}, {self.settings}"

    @property
    def world(self) -> int:
        return int(self.ranks)

    @property
    def settings(self) -> str:
        """As the table shows them."""
        return f"gdn={self.gdn} attention={self.attention} moe={self.moe}"

    @property
    def env(self) -> dict[str, str]:
        """The environment that asks for the settings."""
        asked = {"ATOM_PCP_GDN": self.gdn, "ATOM_PCP_ATTENTION": self.attention, "ATOM_PCP_MOE": self.moe}
        return {name: value for name, value in asked.items() if value != NONE}

    @property
    def options(self) -> dict[str, bool]:
        """The options of LLM that the settings need."""
        return {"enable_expert_parallel": True} if self.moe == "ep" else {}


def makes_sense(combo: Combo) -> bool:
    """Whether exactly the layers that the model has are told how to run, and the case can happen to the model."""
    model = MODELS[combo.model]
    if combo.case == "preemption" and combo.model == "qwen3_next_heads":
        return False  # its states make blocks of 96 tokens: requests of the traffic hardly ever need another one
    return (combo.gdn == NONE) == (not model.key_heads) and (combo.moe == NONE) == (not model.expert_width)


def refused_words(combo: Combo) -> list[str]:
    """What the refusal of a combination has to say, by the arithmetic of heads and widths; empty: it is served."""
    model, words = MODELS[combo.model], []
    if combo.gdn == "head_all_to_all" and model.key_heads % combo.world:
        words += ["ATOM_PCP_GDN is head_all_to_all", f"{model.key_heads} key heads", f"over {combo.world} ranks"]
    if combo.moe == "shard" and model.expert_width % (combo.world * CPU_EXPERT_TILE):
        words += ["ATOM_PCP_MOE=shard", f"intermediate size {model.expert_width}", f"into {combo.world} equal slices"]
    return words


def served() -> list[Combo]:
    """Combinations to run: every two values that meet in any served combination meet in one of these."""

    def allowed(row: Row) -> bool:
        combo = Combo(*row)
        return makes_sense(combo) and not refused_words(combo)

    return [Combo(*row) for row in pairwise(FACTORS, allowed)]


def refused() -> list[Combo]:
    """One combination for every model, number of ranks and setting that is refused together."""
    return [combo for combo in _one_setting_each() if refused_words(combo)]


def _one_setting_each() -> Iterator[Combo]:
    for name, model in MODELS.items():
        gdn, moe = ("auto" if model.key_heads else NONE), ("replicate" if model.expert_width else NONE)
        for ranks in WORLDS:
            yield Combo(name, ranks, CASES[0], "head_all_to_all" if model.key_heads else NONE, ATTENTION[0], moe)
            yield Combo(name, ranks, CASES[0], gdn, ATTENTION[0], "shard" if model.expert_width else NONE)


def selection(worlds: set[str], models: set[str], limit: int | None = None) -> list[Combo]:
    """The part of the matrix with these numbers of ranks and models, or the first `limit` served ones of it."""
    run = [combo for combo in served() if combo.ranks in worlds and combo.model in models][:limit]
    return run + [combo for combo in refused() if combo.ranks in worlds and combo.model in models]
