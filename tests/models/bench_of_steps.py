"""A decoder with plain parts, driven step by step over sequences, beside the model of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from checkpoints import checkpoint
from plain_latent import CachedLatents, PlainIndexer
from plain_parts import CachedAttention, PlainParts, load
from safetensors.torch import load_file
from step_rows import ROWS
from torch import Tensor

from atom_patches.models.config import DecoderConfig
from atom_patches.models.decoder import Decoder, DecoderOutput
from atom_patches.models.families import ARCHITECTURES, read
from atom_patches.models.families import make as make_decoder
from atom_patches.runtime.context import bind_gdn, step
from atom_patches.runtime.gdn import GdnBinding, LayerStates
from atom_patches.runtime.step import StepMode, StepPlan

#: Checkpoints: three of four layers are recurrent in the hybrids', none in the others'.
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
DENSE = ("llama_tied", "llama_bias", "qwen3_tied", "qwen3_moe", "qwen3_moe_plain", "deepseek_v3", "deepseek_v32")
FAMILIES = (*HYBRIDS, *DENSE)
SLOTS = 8


@cache
def oracle(family: str) -> Any:
    """The model of transformers, float32."""
    import transformers

    path = checkpoint(family)
    name = json.loads((path / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()


@cache
def saved(family: str) -> dict[str, Tensor]:
    """The checkpoint's tensors, by the names that they have on disk."""
    files = sorted(checkpoint(family).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@cache
def reference(family: str, tokens: tuple[int, ...]) -> Tensor:
    """Logits `[tokens, vocabulary]` of a whole sequence at once."""
    with torch.no_grad():
        return oracle(family)(torch.tensor([tokens]), use_cache=False).logits[0]


def head(family: str, hidden: Tensor) -> Tensor:
    """Logits of a decoder's output."""
    return oracle(family).lm_head(hidden)


def text_config(family: str) -> Any:
    return oracle(family).config.get_text_config()


def family_of(family: str) -> str:
    """The decoder's, of a checkpoint."""
    return ARCHITECTURES[oracle(family).config.architectures[0]]


def config_of(family: str) -> DecoderConfig:
    return read(family_of(family), text_config(family))


def make(family: str, parts: PlainParts) -> Decoder:
    decoder = make_decoder(family_of(family), text_config(family), parts)
    load(decoder, parts, saved(family).items())
    return decoder


class Bench:
    """Sequences that go on from step to step; sequence i has state slot i + 1, so that slot 0 is nobody's."""

    def __init__(self, family: str, parts: PlainParts | None = None, drafted: int = 0) -> None:
        self.family = family
        self.parts = parts or PlainParts()
        self.decoder = make(family, self.parts)
        self.done: dict[int, int] = {}
        self.layers = self._states(drafted)

    def _states(self, drafted: int) -> dict[int, LayerStates]:
        """Pools of random states: what a sequence reads before it has written would show."""
        config, ranks = self.decoder.config, self.parts.ranks.size
        channels = (2 * config.keys + config.values) // ranks
        temporal = (config.value_heads // ranks, config.value_size, config.key_size)
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        past = config.taps - 1
        return {
            layer: LayerStates(
                random(SLOTS, channels, past),
                random(SLOTS, *temporal),
                random(SLOTS, drafted, channels, past) if drafted else None,
                random(SLOTS, drafted, *temporal) if drafted else None,
            )
            for layer, kind in enumerate(config.kinds)
            if kind == "recurrent"
        }

    def forget(self) -> None:
        """Let all sequences begin anew; their slots keep what they hold."""
        self.done.clear()
        for module in self.decoder.modules():
            if isinstance(module, CachedAttention | CachedLatents | PlainIndexer):
                module.cache.clear()

    def snapshot(self) -> list[Tensor]:
        """Copies of all live states."""
        return [pool.clone() for states in self.layers.values() for pool in (states.conv, states.temporal)]

    def bind(self, batch: Sequence[tuple[int, int]], decodes: int, drafted: int = 0) -> GdnBinding:
        """The recurrent metadata of sequences with rows; the first `decodes` of them decode, drafts are verified."""
        if not batch:
            return GdnBinding.idle(self.layers, torch.device("cpu"))
        rows = torch.tensor([0, *(count for _, count in batch)])
        verifies = len(batch) if drafted else 0
        return GdnBinding(
            query_start_loc=rows.cumsum(0).int(),
            slots=torch.tensor([sequence + 1 for sequence, _ in batch], dtype=torch.int32),
            has_initial_state=torch.tensor([self.done.get(sequence, 0) > 0 for sequence, _ in batch]),
            layers=self.layers,
            decodes=decodes,
            verifies=verifies,
            prefills=len(batch) - decodes - verifies,
            draft_tokens=drafted,
            draft_rows=torch.arange(verifies).flip(0) if drafted else None,
        )

    def run(
        self,
        tokens: Mapping[int, Sequence[int]],
        *,
        decode: bool = True,
        padding: int = 0,
        drafted: int = 0,
        **inputs: Any,
    ) -> tuple[DecoderOutput, dict[int, Tensor]]:
        """One step over sequences with new tokens.

        Args:
            decode: whether single tokens go through the kernels for decoding, or are prefilled like the others.
            padding: rows behind the last sequence.
            drafted: tokens are drafts of that many: nothing goes on from them.

        Returns:
            what the decoder gave, and the logits of each sequence's rows.
        """
        alone = [s for s, new in tokens.items() if decode and len(new) == 1 and self.done.get(s) and not drafted]
        batch = [(s, len(tokens[s])) for s in (*alone, *(s for s in tokens if s not in alone))]
        ids = torch.tensor([t for s, _ in batch for t in tokens[s]] + [1] * padding, dtype=torch.int64)
        start = [self.done.get(s, 0) for s, _ in batch]
        positions = torch.tensor([i for at, (_, n) in zip(start, batch, strict=True) for i in range(at, at + n)])
        positions = torch.cat([positions.long(), torch.zeros(padding, dtype=torch.int64)])
        plan = StepPlan.of(StepMode.MIXED if batch else StepMode.IDLE, len(ids))
        binding = self.bind(batch, len(alone), drafted)
        inputs = {"positions": positions, "input_ids": ids, **inputs}
        with step(plan), bind_gdn(binding), ROWS.entered(batch), torch.no_grad():
            output = self.decoder(**inputs)
        if not drafted:
            self.done.update({s: self.done.get(s, 0) + n for s, n in batch})
        rows = output.hidden[: len(ids) - padding].split([n for _, n in batch]) if batch else ()
        return output, {s: head(self.family, part) for (s, _), part in zip(batch, rows, strict=True)}


def prompts(family: str, *lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 250, (length,), generator=generator).tolist()) for length in lengths]
