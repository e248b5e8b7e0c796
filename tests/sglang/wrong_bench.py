"""`bench engine` with an overlay that is not what it should be: `python wrong_bench.py WRONG ARGUMENTS`.

WRONG is `stock` (the overlay's side runs SGLang's own model) or `norms` (its norms' weights are not those of stock).
"""

from __future__ import annotations

import dataclasses
import sys

from atom_patches import arming

arming.disarm()

from atom_patches.bench import engines  # noqa: E402
from atom_patches.cli import main  # noqa: E402

BIASED = {"SGLANG_PLUGINS": "biased", "BIASED": "0.1"}
FOLDER = engines.STAND_IN.parents[1] / "biased"

wrong, *arguments = sys.argv[1:]
overlay = {
    "stock": engines.SGLANG.stock["cpu"],
    "norms": {**engines.SGLANG.overlay, **BIASED},
}[wrong]
path = {"cpu": (*engines.SGLANG.path["cpu"], FOLDER)}
engines.ENGINES["sglang"] = dataclasses.replace(engines.SGLANG, overlay=overlay, path=path)
sys.exit(main(["bench", "engine", "--engine", "sglang", *arguments]))
