"""Every tensor of a checkpoint reaches its parameter, whole, whichever way the checkpoint packs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_of_steps import FAMILIES, config_of, family_of, make, saved, text_config
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_parts import PlainParts
from torch import Tensor, nn

from atom_patches.core.settings import MODEL_FAMILIES
from atom_patches.models.families import ARCHITECTURES, read
from atom_patches.models.families import make as make_decoder
from atom_patches.models.parts import Stage
from atom_patches.models.weights import WeightPiece, fused_names, map_weights

ALL = Stage(0, 4)


def mapped(family: str, weights: Iterable[tuple[str, Tensor]], stage: Stage = ALL) -> list[WeightPiece]:
    return list(map_weights(weights, config_of(family), stage))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost_or_taken_twice(family: str) -> None:
    ours = {n: t for n, t in saved(family).items() if not any(o in n for o in ("visual", "lm_head"))}
    pieces = mapped(family, saved(family).items())
    assert sum(p.tensor.numel() for p in pieces) == sum(t.numel() for t in ours.values())
    places = [(p.name, p.shard, p.expert) for p in pieces]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_share_out_a_checkpoint(family: str) -> None:
    whole = mapped(family, saved(family).items())
    cuts = [Stage(0, 1, last=False), Stage(1, 4, first=False)]
    halves = [piece for stage in cuts for piece in mapped(family, saved(family).items(), stage)]
    assert sorted(p.name for p in whole) == sorted(p.name for p in halves)


heads = st.integers(1, 4)


@given(keys=heads, shared=heads, key_size=heads, value_size=heads, width=heads)
@settings(deadline=None)
def test_packed_projections(keys: int, shared: int, key_size: int, value_size: int, width: int) -> None:
    """Rows of queries, keys, values and gates stand head by head; each is marked with what it is."""
    config = replace(
        config_of("qwen3_next"), key_heads=keys, value_heads=keys * shared, key_size=key_size, value_size=value_size
    )
    expected: dict[int, list[float]] = defaultdict(list)
    packed: list[float] = []
    for head in range(keys):
        for shard, count in enumerate((key_size, key_size, shared * value_size, shared * value_size)):
            rows = [1000.0 * shard + 100 * head + i for i in range(count)]
            expected[shard] += rows
            packed += rows
    tensor = torch.tensor(packed)[:, None].expand(-1, width)
    pieces = list(map_weights([("model.layers.0.linear_attn.in_proj_qkvz.weight", tensor)], config, ALL))
    assert [p.name for p in pieces] == ["layers.0.linear_attn.in_proj_qkvz.weight"] * 4
    assert {p.shard: p.tensor[:, 0].tolist() for p in pieces} == expected
    assert all(p.tensor.shape[1] == width for p in pieces)


@given(keys=heads, shared=heads)
@settings(deadline=None)
def test_packed_gates(keys: int, shared: int) -> None:
    config = replace(config_of("qwen3_next"), key_heads=keys, value_heads=keys * shared)
    packed = [head * 10.0 + i + 100 * which for head in range(keys) for which in (0, 1) for i in range(shared)]
    tensor = torch.tensor(packed)[:, None]
    b, a = map_weights([("model.layers.0.linear_attn.in_proj_ba.weight", tensor)], config, ALL)
    assert b.tensor[:, 0].tolist() == [head * 10.0 + i for head in range(keys) for i in range(shared)]
    assert torch.equal(a.tensor, b.tensor + 100) and (b.shard, a.shard) == (0, 1)


@given(keys=heads, shared=heads, block=heads, parameter=st.sampled_from(["weight", "weight_scale_inv"]))
@settings(deadline=None)
def test_scales_of_blocks_go_with_their_rows(keys: int, shared: int, block: int, parameter: str) -> None:
    """A scale stands for `block` rows: cutting the scales is cutting the rows."""
    config = replace(config_of("qwen3_next"), key_heads=keys, value_heads=keys * shared, key_size=4 * block,
                     value_size=2 * block)  # fmt: skip
    rows = 2 * config.keys + 2 * config.values
    scales = torch.arange(rows // block, dtype=torch.float32)[:, None]
    name = f"model.layers.0.linear_attn.in_proj_qkvz.{parameter}"
    by_scale = list(map_weights([(name, scales)], config, ALL))
    by_row = list(map_weights([(name, scales.repeat_interleave(block, 0))], config, ALL))
    for few, many in zip(by_scale, by_row, strict=True):
        assert torch.equal(few.tensor.repeat_interleave(block, 0), many.tensor)


def test_one_scale_is_everybodys() -> None:
    name = "model.layers.0.linear_attn.in_proj_qkv.weight_scale"
    pieces = mapped("qwen3_5", [(name, torch.tensor(2.0))])
    assert [p.shard for p in pieces] == [0, 1, 2] and all(p.tensor.item() == 2 for p in pieces)


def test_experts_apart_and_together() -> None:
    gate_up, down = torch.randn(2, 6, 5), torch.randn(2, 5, 3)
    together = mapped(
        "qwen3_5_moe",
        [("model.layers.1.mlp.experts.gate_up_proj", gate_up), ("model.layers.1.mlp.experts.down_proj", down)],
    )
    apart = mapped(
        "qwen3_5_moe",
        [
            (f"model.layers.1.mlp.experts.{expert}.{which}_proj.weight", tensor)
            for expert in range(2)
            for which, tensor in zip(
                ("gate", "up", "down"), (*gate_up[expert].chunk(2), down[expert]), strict=True
            )
        ],
    )  # fmt: skip

    def key(piece: WeightPiece) -> tuple[int | None, str]:
        return piece.expert, str(piece.shard)

    for one, other in zip(sorted(together, key=key), sorted(apart, key=key), strict=True):
        assert (one.name, key(one)) == (other.name, key(other)) and torch.equal(one.tensor, other.tensor)
        assert one.name == "layers.1.mlp.experts.weight"


def test_names_of_quantised_experts() -> None:
    (piece, _) = mapped("qwen3_5_moe", [("model.layers.1.mlp.experts.gate_up_proj_scale_inv", torch.ones(1, 2, 1))])
    assert piece.parameter == "scale_inv"


def test_scales_of_the_cache() -> None:
    (piece,) = mapped("qwen3_5", [("model.language_model.layers.3.self_attn.k_proj.k_scale", torch.ones(1))])
    assert piece.name == "layers.3.self_attn.attn.k_scale"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.0.linear_attn.in_proj_qkv.qweight", (256, 8), "cannot be cut"),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", (7, 8), "cannot be cut"),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", (7, 8), "cannot be dealt out to 2 heads"),
        ("transformer.h.0.weight", (7, 8), "belongs to no part"),
    ],
)
def test_what_cannot_be_placed(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapped("qwen3_next", [(name, torch.zeros(shape))])


def test_others_are_left_out() -> None:
    others = ["lm_head.weight", "model.visual.blocks.0.norm1.weight", "mtp.layers.0.mlp.gate.weight",
              "model.layers.3.self_attn.rotary_emb.inv_freq"]  # fmt: skip
    assert not mapped("qwen3_5", [(name, torch.zeros(1)) for name in others])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias must be false"),
        ("qwen3_5", {"output_gate_type": "tanh"}, "output_gate_type must be one of silu, swish, sigmoid, got 'tanh'"),
        ("qwen3_5", {"layers_block_type": ["mamba"]}, "layers must be one of"),
        ("qwen3_5", {"rope_parameters": {"mrope_section": [4, 2, 2]}}, "must be interleaved"),
        ("llama_tied", {"mlp_bias": True}, "mlp_bias must be False, got True"),
        ("llama_tied", {"rope_is_neox_style": False}, "rope_is_neox_style must be True"),
        ("llama_tied", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "one of .*, got 'dynamic'"),
        ("llama_tied", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs high_freq_factor, low_freq"),
        ("deepseek_v3", {"index_topk": 16}, "index_topk must not be set"),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank must be set"),
        ("deepseek_v3", {"swiglu_limit": 7.0}, "swiglu_limit must be None, got 7.0"),
        ("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq must be 1, got 4"),
        ("deepseek_v32", {"index_topk_pattern": "FSSF"}, "index_topk_pattern must name no S, got 'FSSF'"),
        ("qwen3_tied", {"use_sliding_window": True}, "use_sliding_window must be False"),
        ("qwen3_tied", {"layer_types": ["sliding_attention"]}, "layers must be one of .* got sliding_attention"),
        (
            "qwen3_tied",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                                 "attention_factor": 2.0}},
            "is not computed with attention_factor",
        ),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(family: str, change: dict[str, object], message: str) -> None:
    config = deepcopy(text_config(family))
    for name, value in change.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        read(family_of(family), config)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_layers_without_experts(family: str) -> None:
    config = deepcopy(text_config(family))
    config.mlp_only_layers = [1]
    assert read(family, config).sparse == (True, False, True, True)
    config.decoder_sparse_step = 2
    assert read(family, config).sparse == (False, False, False, True)


def test_experts_that_stand_in_no_groups() -> None:
    config = deepcopy(text_config("deepseek_v3"))
    config.n_group = config.topk_group = None
    experts = read("deepseek_v3", config).experts
    assert experts is not None and (experts.groups, experts.chosen_groups) == (1, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_names_are_those_that_the_checkpoint_has(family: str) -> None:
    """Whatever a layer runs as one is listed, under the names of this checkpoint and no other's."""
    packed = family_of(family) == "qwen3_next"
    fused = fused_names(packed=packed)
    there = {name.rpartition(".")[0] for name in saved(family)}
    for name, tensor in saved(family).items():
        module, _, parameter = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if parameter != "weight" or tensor.dim() != 2 or "visual" in name or ".experts." in name:
            continue
        for piece in mapped(family, [(name, tensor)]):
            layer = piece.module.rpartition(".")[2]
            assert last in fused.get(layer, [layer]), name
            assert {f"{parent}.{part}" for part in fused.get(layer, [])} <= there


class Named(PlainParts):
    """Parts that write down what layers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def column(self, *sizes: Any, prefix: str, **more: Any) -> nn.Module:
        self.names.add(prefix)
        return super().column(*sizes, prefix=prefix, **more)

    def qkv(self, *sizes: Any, prefix: str, **more: Any) -> nn.Module:
        self.names.add(prefix)
        return super().qkv(*sizes, prefix=prefix, **more)

    def row(self, *sizes: Any, prefix: str, **more: Any) -> nn.Module:
        self.names.add(prefix)
        return super().row(*sizes, prefix=prefix, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_called_what_the_checkpoint_calls_them(family: str) -> None:
    """By these names engines look up which layers a checkpoint leaves unquantised."""
    parts = Named()
    make_decoder(family_of(family), text_config(family), parts)
    fused = fused_names(packed=family_of(family) == "qwen3_next")
    there = {name.rpartition(".")[0].replace("language_model.", "") for name in saved(family)}
    for name in parts.names:
        parent, _, last = name.rpartition(".")
        assert {f"{parent}.{part}" for part in fused.get(last, [last])} <= there


def test_every_family_has_its_file_and_can_be_asked_for() -> None:
    assert sorted(set(ARCHITECTURES.values())) == sorted(MODEL_FAMILIES)


def test_a_decoder_is_loaded_whole() -> None:
    """The loader of the tests itself: what is missing is found."""
    short = {n: t for n, t in saved("qwen3_5").items() if not n.endswith("k_norm.weight")}
    from plain_parts import load

    with pytest.raises(AssertionError, match="not loaded: .*k_norm"):
        load(make("qwen3_5", PlainParts()), PlainParts(), short.items())
