"""The life of one step: SGLang's batch in, rows of hidden states out, the same on a busy rank and on an idle one.

plan            of numbers that all ranks know
materialise     an idle rank's row
enter           the exchange's sizes, the batch, the plan, the recurrent binding: scopes, left in every case
run             the decoder
trim            what goes to logits, captured hidden states and the next pipeline stage to the rows that SGLang gave
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atom_patches.models.decoder import Carried, Decoder, DecoderOutput
from atom_patches.runtime import context
from atom_patches.runtime.idle import Fallback, ModelInputs, dummy_inputs, one_row
from atom_patches.runtime.step import StepPlan, count_tokens
from atom_patches.sglang.adapters.current import BATCH
from atom_patches.sglang.adapters.gdn_binding import gdn_binding
from atom_patches.sglang.adapters.idle_rows import exchanging, with_dummy_rows
from atom_patches.sglang.adapters.step_plan import plan_step

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class StepInputs:
    """What SGLang calls a model with.

    Attributes:
        tokens: token ids or embeddings, and positions.
        carried: what an earlier pipeline stage left.
        deepstack: features of pictures for the first layers, `[rows, layers * hidden]`.
    """

    tokens: ModelInputs
    carried: Carried | None = None
    deepstack: Tensor | None = None

    def rows(self) -> int:
        """Rows that SGLang handed over."""
        tokens = self.tokens
        if self.carried is not None:
            return self.carried.hidden.shape[0]
        if tokens.input_embeds is not None:
            return tokens.input_embeds.shape[0]
        if tokens.input_ids is not None:
            return tokens.input_ids.shape[0]
        return 0 if tokens.positions is None else count_tokens(tokens.positions)


def forward_step(
    decoder: Decoder,
    batch: ForwardBatch,
    inputs: StepInputs,
    *,
    fallback: Fallback,
    capture: frozenset[int] = frozenset(),
) -> DecoderOutput:
    """Run one step of SGLang's through a decoder.

    Args:
        decoder: made of SGLang's parts.
        batch: SGLang's; not changed.
        inputs: its tensors, any of which may be missing on a rank without requests.
        fallback: what those look like.
        capture: layers whose input is reported.
    """
    plan = plan_step(batch, inputs.rows())
    ready = materialise(inputs, plan, fallback)
    seen = with_dummy_rows(batch, plan, ready.tokens)
    with ExitStack() as scopes:
        scopes.enter_context(exchanging(batch, plan))
        scopes.enter_context(BATCH.entered(seen))
        scopes.enter_context(context.step(plan))
        binding = gdn_binding(seen)
        if binding is not None:
            scopes.enter_context(context.bind_gdn(binding))
        output = decoder(
            ready.tokens.input_ids,
            ready.tokens.positions,
            input_embeds=ready.tokens.input_embeds,
            carried=ready.carried,
            deepstack=ready.deepstack,
            capture=capture,
        )
    return trim(output, plan)


def materialise(inputs: StepInputs, plan: StepPlan, fallback: Fallback) -> StepInputs:
    """The tensors that the decoder runs on: those given, or one row that stands for nothing.

    SGLang leaves out positions of an idle rank also where it pads that rank's batch; those rows stand at position 0.
    """
    tokens = inputs.tokens
    if plan.needs_dummy:
        carried = inputs.carried and Carried(one_row(inputs.carried.hidden), _row(inputs.carried.residual))
        return StepInputs(dummy_inputs(tokens, fallback), carried, _row(inputs.deepstack))
    if tokens.positions is None:
        tokens = dataclasses.replace(tokens, positions=_zero_positions(plan.physical_tokens, fallback))
    return dataclasses.replace(inputs, tokens=tokens)


def trim(output: DecoderOutput, plan: StepPlan) -> DecoderOutput:
    """Without the row that stands for nothing, in all that leaves the decoder."""
    if not plan.needs_dummy:
        return output
    return DecoderOutput(
        plan.trim(output.hidden),
        None if output.residual is None else plan.trim(output.residual),
        tuple(plan.trim(captured) for captured in output.captured),
    )


def _row(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else one_row(rows)


def _zero_positions(rows: int, fallback: Fallback) -> Tensor:
    shape = (rows,) if fallback.position_axes == 1 else (fallback.position_axes, rows)
    return torch.zeros(shape, dtype=torch.int64, device=fallback.device)
