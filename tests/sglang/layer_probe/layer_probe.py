"""A plugin of SGLang's that writes down every step of an ATOM decoder: its plan, and the layers that ran in it, those
whose experts are this package's kernels, and of these those that take the shared expert along.

One line of JSON a step and process, in the directory LAYER_PROBE. With the plugin named in SGLANG_PLUGINS, and the
folder of this file on PYTHONPATH, it is in every scheduler. It changes nothing else, unless OWN_PRODUCTS is set: then
all matrices count as measured, so that their products of few rows are this package's, and are counted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_ran: ContextVar[Counter[str] | None] = ContextVar("_ran", default=None)


def install() -> None:
    """Wrap the decoder and its layers."""
    from atom_patches.models import decoder

    if getattr(decoder.Decoder.forward, "probed", False):
        return
    if os.environ.get("OWN_PRODUCTS"):
        _own_products()
    layer_forward, decoder_forward = decoder.DecoderLayer.forward, decoder.Decoder.forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran = _ran.get()
        if ran is not None:
            ran["recurrent" if self.recurrent else "attention"] += 1
        return layer_forward(self, *args, **kwargs)

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _ran.set(Counter())
        try:
            output = decoder_forward(self, *args, **kwargs)
            _append((_ran.get() or Counter()) + experts_of(self), output)
            return output
        finally:
            _ran.reset(token)

    write.probed = True  # type: ignore[attr-defined]
    decoder.DecoderLayer.forward = count
    decoder.Decoder.forward = write


def _own_products() -> None:
    from atom_patches.models import few_rows
    from atom_patches.sglang.adapters import products

    plain = products.linear

    def count(*arguments: Any) -> Any:
        ran = _ran.get()
        if ran is not None:
            ran["products"] += 1
        return plain(*arguments)

    few_rows.measured = lambda weight: True
    products.linear = count


def experts_of(decoder: Any) -> Counter[str]:
    """Layers whose experts are this package's kernels, and that take the shared expert along."""
    found: Counter[str] = Counter()
    for module in decoder.modules():
        found["own"] += getattr(module, "own", False)
        found["along"] += getattr(module, "taken_along", False)
    return found


def _append(ran: Counter[str], output: Any) -> None:
    from atom_patches.runtime.context import STEP

    step = STEP.required()
    plan = step.plan
    assert plan is not None
    line = {
        "rank": plan.rank,
        "mode": plan.mode.value,
        "together": plan.global_mode.value,
        "uniform_decode": plan.uniform_decode,
        "logical": plan.logical_tokens,
        "physical": list(plan.tokens_across_ranks),
        "rows": output.hidden.shape[0],
        "sequences": step.gdn.sequences if step.gdn else None,
        "captured": len(output.captured),
        **ran,
    }
    with (Path(os.environ["LAYER_PROBE"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
