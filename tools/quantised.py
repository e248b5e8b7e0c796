"""Quantised checkpoints in the published layouts, and the same weights as they are then computed with, in float32.

    python tools/quantised.py llama_tied fp8        # makes what is missing, prints the two directories

They are made of those of checkpoints.py, and lie beside them. Formats are `fp8` (blocks of 16 by 16), `int8`
(compressed-tensors, a scale for each row), `gptq` and `awq` (4 bits, 32 inputs with one scale).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import checkpoint
from safetensors.torch import load_file, save_file
from toolcache import cache_root, content_hash, locked
from torch import Tensor

BLOCK, GROUP = 16, 32
LARGEST = 448.0  # of float8_e4m3fn
#: Projections that published checkpoints quantise, by the end of their names.
QUANTISED = re.compile(
    r".*layers\.\d+\..*(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|(?:gate|up|down)_proj"
    r"|in_proj_(?:qkvz|qkv|z)|out_proj|indexer\.w(?:k|q_b))\.weight"
)
#: Of these none is, as in some published checkpoints, so that engines have to look at their lists of names.
LEFT = re.compile(r".*layers\.3\.self_attn\.[qkv]_proj\.weight|.*layers\.2\.mlp\.down_proj\.weight")
ALL_EXPERTS = re.compile(r"(.*experts)\.(gate_up|down)_proj")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
#: Values of four bits in an int32, the lowest first.
NIBBLES = 4 * torch.arange(8)


@dataclass(frozen=True)
class Format:
    """How a weight `[outputs, inputs]` is stored, by the names of its tensors, and what it is worth; what is said."""

    store: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    says: Callable[[list[str]], dict[str, Any]]


def _fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / LARGEST
    whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    stored = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * whole


def _int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0 to 15 `[outputs, inputs]`, scales `[outputs, groups]`, and the weight: 8 stands for nothing."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / 7).to(torch.float16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
    return values.flatten(1).int(), scale, ((values - 8) * scale.float()[..., None]).flatten(1)


def _pack(values: Tensor) -> Tensor:
    """Eight neighbours of the last dimension in one."""
    shifted = values.unflatten(-1, (-1, 8)).long() << NIBBLES
    whole = shifted.sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


def _gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, worth = _four_bits(weight)
    outputs, inputs = weight.shape
    zeros = torch.full((inputs // GROUP, outputs), 7)  # one less, as its first tools wrote it
    return {
        "qweight": _pack(values).T.contiguous(),
        "qzeros": _pack(zeros),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
        "bias": torch.zeros(outputs, dtype=torch.float16),
    }, worth


def _awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, worth = _four_bits(weight)
    outputs, inputs = weight.shape

    def packed(x: Tensor) -> Tensor:
        return _pack(x.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))

    zeros = torch.full((inputs // GROUP, outputs), 8)
    return {"qweight": packed(values.T), "qzeros": packed(zeros), "scales": scale.T.contiguous()}, worth


FORMATS = {
    "fp8": Format(
        _fp8,
        lambda left: {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": left,
        },
    ),
    "int8": Format(
        _int8,
        lambda left: {
            "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
            "kv_cache_scheme": None, "ignore": left,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                                "dynamic": False},
                    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                                          "dynamic": True},
                }
            },
        },
    ),
    "gptq": Format(
        _gptq,
        lambda left: {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False,
            "checkpoint_format": "gptq",
        },
    ),
    "awq": Format(
        _awq,
        lambda left: {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": left,
        },
    ),
}  # fmt: skip


def _apart(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """With an expert's matrices apart, as quantised checkpoints have them."""
    experts = ALL_EXPERTS.fullmatch(name)
    if experts is None:
        return {name: tensor}
    names = ("gate", "up") if experts[2] == "gate_up" else ("down",)
    return {
        f"{experts[1]}.{number}.{which}_proj.weight": part
        for number, own in enumerate(tensor)
        for which, part in zip(names, own.chunk(len(names)), strict=True)
    }


def _store(name: str, tensor: Tensor, form: str, left: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    """One tensor's successors, and what they are worth; what is stored as it was goes to the list."""
    module, _, _ = name.rpartition(".")
    if QUANTISED.fullmatch(name) and "visual" not in name and (form == "gptq" or not LEFT.fullmatch(name)):
        parts, worth = FORMATS[form].store(tensor)
        return {f"{module}.{part}": value.contiguous() for part, value in parts.items()}, worth
    left += [module] if tensor.dim() == 2 and "embed" not in name else []
    return {name: tensor.contiguous()}, tensor


def _make(source: Path, form: str, path: Path) -> None:
    """Both directories: what engines read, and the same weights in float32 under the names that they had."""
    for folder in ("stored", "worth"):
        shutil.copytree(source, path / folder, ignore=shutil.ignore_patterns("*.safetensors"))
    left: list[str] = []
    places: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        stored: dict[str, Tensor] = {}
        worth: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            parts: list[Tensor] = []
            for part, own in _apart(name, tensor).items():
                new, value = _store(part, own, form, left)
                stored |= new
                parts.append(value)
            worth[name] = torch.cat(parts).view(tensor.shape).contiguous()
        save_file(stored, path / "stored" / file.name, {"format": "pt"})
        save_file(worth, path / "worth" / file.name, {"format": "pt"})
        places |= dict.fromkeys(stored, file.name)
    index = path / "stored" / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = FORMATS[form].says(left)
    (path / "stored" / "config.json").write_text(json.dumps(config, indent=2))


def quantised(name: str, form: str) -> tuple[Path, Path]:
    """The quantised checkpoint, and what its weights are worth; made if they are not there yet (a second)."""
    source = checkpoint(name)
    path = cache_root() / "checkpoints" / content_hash([Path(__file__)], source.parent.name) / f"{name}-{form}"
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                _make(source, form, Path(scratch) / "both")
                shutil.move(Path(scratch) / "both", path)
    return path / "stored", path / "worth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("format", choices=FORMATS)
    args = parser.parse_args()
    print(*quantised(args.name, args.format), sep="\n")


if __name__ == "__main__":
    main()
