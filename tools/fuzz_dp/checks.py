"""What must hold in every step of a rank besides the sequence of its collectives.

The plan is recorded as if it were a collective: ranks must not only meet, they must also agree on what they meet for.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .recorder import Entry, Recorder
from .schedule import Action


class Violation(AssertionError):
    """A rule that a step broke."""


class Checks:
    """Watches one rank; knows SGLang's own decoders, and the overlay's if they are asked for."""

    def __init__(self, engine: Any, recorder: Recorder, decoders: str) -> None:
        self.engine = engine
        self.recorder = recorder
        self.layers = 0  # runs of decoder layers, of the class that was asked for
        self.idle_rows = 0  # runs of layers for a rank without requests
        self.action: Action | None = None
        self._watch_layers(decoders)
        self._watch_logits()
        if decoders == "atom":
            self._watch_plan()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        self.action = action
        before = self._states() if action.kind == "idle" else []
        yield
        for name, was, now in zip(("keys", "values", "windows", "states"), before, self._states(), strict=False):
            if not was.equal(now):
                raise Violation(f"a rank without requests changed {name} that requests read")
        self._scopes_are_left()

    def summary(self) -> dict[str, int]:
        return {"layers": self.layers, "of idle ranks": self.idle_rows}

    def _states(self) -> list[Any]:
        """What requests read: the cache and the recurrent states, without the rows that are kept for padding."""
        requests, cache = self.engine.pools[0], self.engine.runner.token_to_kv_pool
        layer = next(iter(requests.mamba_map))
        states = requests.mamba2_layer_cache(layer)
        attention = [i for i in range(self.engine.layer_count()) if i not in requests.mamba_map][0]
        keys, values = cache.get_kv_buffer(attention)
        return [keys[1:].clone(), values[1:].clone(), states.conv[0].clone(), states.temporal.clone()]

    def _watch_layers(self, decoders: str) -> None:
        from torch import nn

        layers = [m for n, m in self.engine.runner.model.named_modules() if n.rpartition(".")[0].endswith("layers")]
        if len(layers) != self.engine.layer_count():
            raise Violation(f"the model has {len(layers)} decoder layers, not {self.engine.layer_count()}")
        ours = {type(layer).__module__.startswith("atom_patches.") for layer in layers}
        if ours != {decoders == "atom"}:
            raise Violation(f"asked for {decoders} decoders, got {sorted({str(type(layer)) for layer in layers})}")

        def ran(module: nn.Module, inputs: Any) -> None:
            self.layers += 1
            self.idle_rows += self.action is not None and self.action.kind == "idle"

        def fields_agree(module: nn.Module, inputs: Any) -> None:
            self._fields_agree()

        def no_empty_rows(module: nn.Module, inputs: Any) -> None:
            for value in inputs:
                if hasattr(value, "shape") and len(value.shape) > 1 and value.shape[-2] == 0:
                    raise Violation(f"{type(module).__name__} was handed zero rows: {list(value.shape)}")

        for layer in layers:
            layer.register_forward_pre_hook(ran)
            if decoders == "atom":
                layer.register_forward_pre_hook(fields_agree)
                for module in layer.modules():
                    module.register_forward_pre_hook(no_empty_rows)

    def _fields_agree(self) -> None:
        """The batch that the decoder sees has as many rows and requests as it says, and a dummy reads no request's."""
        from atom_patches.runtime.context import STEP
        from atom_patches.sglang.adapters.current import BATCH

        batch, plan = BATCH.required(), STEP.required().plan
        if plan is None:
            raise Violation("a decoder runs without a plan")
        rows = {"input_ids": plan.physical_tokens, "out_cache_loc": plan.physical_tokens}
        rows |= dict.fromkeys(("req_pool_indices", "seq_lens", "seq_lens_cpu"), batch.batch_size)
        found = {name: len(getattr(batch, name)) for name in rows}
        if found != rows:
            raise Violation(f"a batch of {batch.batch_size} requests, {plan.physical_tokens} rows has {found}")
        if plan.needs_dummy and any([*batch.req_pool_indices, *batch.out_cache_loc]):
            raise Violation(f"a dummy row stands in slots {batch.req_pool_indices}, {batch.out_cache_loc}")

    def _watch_logits(self) -> None:
        from sglang.srt.layers.logits_processor import LogitsProcessor

        original = LogitsProcessor.forward

        def forward(processor: Any, input_ids: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            rows = {"hidden states": hidden.shape[0]}
            captured = kwargs.get("aux_hidden_states") or (args[2] if len(args) > 2 else None) or ()
            rows |= {f"captured hidden states {i}": layer.shape[0] for i, layer in enumerate(captured)}
            if input_ids is not None:
                for name, count in rows.items():
                    if count != input_ids.shape[0]:
                        raise Violation(f"{count} rows of {name} go to the logits of {input_ids.shape[0]} tokens")
            return original(processor, input_ids, hidden, *args, **kwargs)

        LogitsProcessor.forward = forward

    def _watch_plan(self) -> None:
        from atom_patches.sglang.adapters import forward_step

        original: Callable[..., Any] = forward_step.plan_step

        def plan_step(*args: Any, **kwargs: Any) -> Any:
            plan = original(*args, **kwargs)
            self.recorder.enter(self._plan_entry(plan))
            return plan

        forward_step.plan_step = plan_step

    def _plan_entry(self, plan: Any) -> Entry:
        return Entry(
            "plan",
            "step",
            tuple(range(self.engine.arguments.tp_size)),
            agreed=(
                f"rows {plan.tokens_across_ranks}",
                f"uniform decode {plan.uniform_decode}",
                f"graph {plan.graph_size}",
            ),
            site=f"the plan of a rank that should {self.action}",
        )

    def _scopes_are_left(self) -> None:
        try:
            from atom_patches.runtime.context import STEP
            from atom_patches.sglang.adapters.current import BATCH
        except ImportError:
            return
        for scope in (STEP, BATCH):
            if scope.current() is not None:
                raise Violation(f"a {scope.name} is still current after the step")
