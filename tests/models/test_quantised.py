"""Which quantised checkpoints a decoder runs: those of the formats that were shown for the engine, as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from bench_of_steps import config_of
from quantised import FORMATS

from atom_patches.models.quantised import AWQ, FP8_BLOCKS, GPTQ, INT8, Served, read_format, refusal, said

NAMES = {"fp8": FP8_BLOCKS, "int8": INT8, "gptq": GPTQ, "awq": AWQ}
ONE = {GPTQ: Served(frozenset({"ours"}), experts=False, recurrent=False)}


def says(form: str) -> dict[str, Any]:
    return FORMATS[form].says(["lm_head"])


@pytest.mark.parametrize("form", FORMATS)
def test_published_configurations_are_known(form: str) -> None:
    assert read_format(says(form)) == NAMES[form]


def changed(form: str, path: str, value: object) -> dict[str, Any]:
    """A configuration with one value changed, or added."""
    whole = says(form)
    *parents, last = path.split(".")
    inner = whole
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return whole


@pytest.mark.parametrize(
    ("form", "path", "value", "message"),
    [
        ("fp8", "quant_method", "mxfp4", "quant_method must be one of awq, compressed-tensors, fp8, gptq, got 'mxfp4'"),
        ("fp8", "activation_scheme", "static", "activation_scheme must be 'dynamic', got 'static'"),
        ("fp8", "fmt", "e5m2", "fmt must be 'e4m3'"),
        ("fp8", "weight_block_size", None, "weight_block_size must be set"),
        ("gptq", "bits", 8, "bits must be 4, got 8"),
        ("gptq", "checkpoint_format", "marlin", "checkpoint_format must be 'gptq'"),
        ("gptq", "dynamic", {"-:.*": {}}, "dynamic must be"),
        ("awq", "bits", None, "bits must be 4, got None"),
        ("awq", "version", "gemv", "version must be 'gemm'"),
        ("int8", "format", "pack-quantized", "format must be 'int-quantized'"),
        ("int8", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme must be"),
        ("int8", "sparsity_config", {"format": "sparse-24-bitmask"}, "format must be 'dense'"),
        ("int8", "config_groups", {}, "config_groups must be one for all layers, got 0"),
        ("int8", "config_groups.group_0.targets", ["re:.*mlp.*"], "targets must be"),
        ("int8", "config_groups.group_0.weights.strategy", "group", "strategy must be 'channel'"),
        ("int8", "config_groups.group_0.weights.symmetric", False, "symmetric must be True"),
        ("int8", "config_groups.group_0.input_activations.dynamic", False, "dynamic must be True"),
        ("int8", "config_groups.group_0.input_activations", None, "type must be 'int', got None"),
    ],
)
def test_others_are_refused_by_name(form: str, path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_format(changed(form, path, value))


def test_what_is_optional_may_be_left_out() -> None:
    assert read_format({"quant_method": "gptq", "bits": 4}) == GPTQ
    assert read_format(changed("fp8", "fmt", None)) == FP8_BLOCKS
    assert read_format(changed("int8", "sparsity_config", {"format": "dense"})) == INT8


def test_a_configuration_is_found_wherever_checkpoints_have_it() -> None:
    own = {"quant_method": "fp8"}
    text = SimpleNamespace(quantization_config=own)
    assert said(SimpleNamespace(quantization_config=own)) == own
    assert said(SimpleNamespace(compression_config=own)) == own
    assert said(SimpleNamespace(quantization_config=None, text_config=text)) == own
    assert said(SimpleNamespace(quantization_config=SimpleNamespace(to_dict=lambda: own))) == own
    assert said(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("form", "method", "model", "message"),
    [
        ("gptq", "ours", "llama_tied", None),
        ("gptq", "another", "llama_tied", "quantised weights (another): GPTQ with 4 bits is not among what is served"),
        ("fp8", "ours", "llama_tied", "quantised weights (ours): FP8 with scales of blocks is not among"),
        ("gptq", "ours", "qwen3_moe", "GPTQ with 4 bits of experts"),
        ("gptq", "ours", "qwen3_5", "GPTQ with 4 bits of recurrent layers"),
        ("", "ours", "llama_tied", "quantised weights (ours), which the checkpoint's are not"),
    ],
)
def test_formats_are_served_where_that_was_shown(form: str, method: str, model: str, message: str | None) -> None:
    hf = SimpleNamespace(quantization_config=says(form) if form else None)
    found = refusal(method, hf, config_of(model), ONE)
    assert found is None if message is None else found is not None and message in found
