"""Small seeded checkpoints in the Hugging Face layout, one per model family.

    python tools/checkpoints.py qwen3_next qwen3     # makes what is missing, prints the directories
    python tools/checkpoints.py --all

`NAME` is tiny (about a million parameters or fewer, for tests); `NAME_demo` has some million and the proportions of the
published models: GatedDeltaNet heads of 128, grouped value heads, one attention layer in four, many experts.
Experts and their widths divide by 2, 3 and 4. Weights are float32; the same seed gives the same bytes. Directories
lie in the user's cache, named by the hash of this file, so a changed recipe never meets an old checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolcache import cache_root, content_hash, locked

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>")  # fmt: skip
BYTES = 256
TOKEN = {name: BYTES + i for i, name in enumerate(SPECIAL)}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_VOCAB = 512
DEMO_VOCAB = 4096
WEIGHTS_SEED = 1234
SHARPNESS = 3.0  # attention scores' standard deviation: heads pick out a few places, however far back
INTERVAL = 4  # the last of so many layers is full attention
CODE = 4.0  # a few times the residual stream's size at the last layer
CLASSES = 8  # of tokens, to the sparse indexer of DeepSeek-V3.2
#: Of checkpoints in several files: the size of one, by the beginning of the checkpoint's name.
SHARDS = {"deepseek": "2MB", "llama_tied": "400KB", "qwen3_tied": "400KB", "qwen3_moe": "2MB"}

Values = dict[str, Any]


def _base(**values: Any) -> Values:
    return {
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": TOKEN["<|im_end|>"],
        "pad_token_id": TOKEN["<|endoftext|>"],
        **values,
    }


TINY: Values = _base(vocab_size=TINY_VOCAB, hidden_size=64, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=32)  # fmt: skip
TINY_GDN: Values = dict(linear_conv_kernel_dim=4, linear_key_head_dim=32, linear_value_head_dim=32,
                        linear_num_key_heads=2, linear_num_value_heads=4)  # fmt: skip
# Heads that can be dealt out over 2, 3 or 4 ranks.
MANY_GDN: Values = dict(linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16,
                        linear_num_key_heads=12, linear_num_value_heads=24)  # fmt: skip
# Experts are cut over 2, 3 or 4 ranks, and vLLM's CPU kernel wants slices of a multiple of 32: hence 384.
TINY_MOE: Values = dict(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=384,
                        shared_expert_intermediate_size=192)  # fmt: skip
DEMO: Values = _base(vocab_size=DEMO_VOCAB, hidden_size=256, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=2, head_dim=64)  # fmt: skip
DEMO_GDN: Values = dict(linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
                        linear_num_key_heads=2, linear_num_value_heads=4)  # fmt: skip
DEMO_MOE: Values = dict(num_experts=12, num_experts_per_tok=4, moe_intermediate_size=384,
                        shared_expert_intermediate_size=384)  # fmt: skip
# As small models are published: one matrix for the embedding and the head, positions beyond those of the training.
LLAMA_TIED: Values = dict(
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position_embeddings=64),
)  # fmt: skip
# Positions that are counted in steps of a quarter, which SGLang's own decoder does and this package's does not.
LLAMA_LINEAR: Values = dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))
QWEN3_TIED: Values = dict(
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64),
)
QWEN3_MOE: Values = dict(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=384, intermediate_size=192,
                         decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[1])  # fmt: skip
NEXT_MOE: Values = dict(decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[])


def _causal(config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def _qwen3(values: Values) -> PreTrainedModel:
    from transformers import Qwen3Config

    return _causal(Qwen3Config(**{"tie_word_embeddings": False, **values}))


def _qwen3_moe(values: Values) -> PreTrainedModel:
    from transformers import Qwen3MoeConfig

    return _causal(Qwen3MoeConfig(tie_word_embeddings=False, **values))


def _llama(values: Values) -> PreTrainedModel:
    from transformers import LlamaConfig

    return _causal(LlamaConfig(**{"tie_word_embeddings": False, **values}))


def _qwen3_next(values: Values) -> PreTrainedModel:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(tie_word_embeddings=False, **values)
    config.full_attention_interval = INTERVAL  # SGLang reads it; transformers keeps the layers' types instead
    return _causal(config)


ROPE_3_5: Values = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5,
                        mrope_section=[4, 2, 2], mrope_interleaved=True)  # fmt: skip


def _as_published(text: PretrainedConfig) -> PretrainedConfig:
    """Published Qwen3.5 configurations have these here, too, and SGLang reads them; transformers has its own names."""
    text.full_attention_interval = INTERVAL
    text.partial_rotary_factor = ROPE_3_5["partial_rotary_factor"]
    return text


def _qwen3_5_text(family: str, values: Values) -> PreTrainedModel:
    """The language model without vision."""
    import transformers

    config = getattr(transformers, f"{family}TextConfig")(**values, rope_parameters=ROPE_3_5, tie_word_embeddings=False)
    return getattr(transformers, f"{family}ForCausalLM")(_as_published(config))


def _qwen3_5(family: str, values: Values) -> PreTrainedModel:
    """A Qwen3.5 checkpoint is a vision-language wrapper: its vision tower is one narrow layer here."""
    import transformers

    text = dict(values, rope_parameters=ROPE_3_5, mtp_num_hidden_layers=0)
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=16, spatial_merge_size=2,
                  temporal_patch_size=2, out_hidden_size=values["hidden_size"], num_position_embeddings=16)  # fmt: skip
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=TOKEN["<|image_pad|>"],
        video_token_id=TOKEN["<|video_pad|>"],
        vision_start_token_id=TOKEN["<|vision_start|>"],
        vision_end_token_id=TOKEN["<|vision_end|>"],
    )
    _as_published(config.text_config)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def _qwen3_vl(values: Values) -> PreTrainedModel:
    """Two narrow layers of vision, whose outputs go to the first two layers of text, too."""
    import transformers

    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=16, spatial_merge_size=2,
                  temporal_patch_size=2, out_hidden_size=values["hidden_size"], num_position_embeddings=16,
                  deepstack_visual_indexes=[0, 1])  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=dict(values, rope_parameters=rope),
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=TOKEN["<|image_pad|>"],
        video_token_id=TOKEN["<|video_pad|>"],
        vision_start_token_id=TOKEN["<|vision_start|>"],
        vision_end_token_id=TOKEN["<|vision_end|>"],
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


DEEPSEEK: Values = _base(
    vocab_size=TINY_VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
    first_k_dense_replace=1, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=96,
    n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.5, tie_word_embeddings=False,
    rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=1024,
                         beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
#: As models that follow DeepSeek's have positions, without its own way to go beyond those of the training.
PLAIN_ROPE: Values = dict(rope_type="default", rope_theta=10000.0)
#: In published configurations; SGLang reads them, and transformers' models compute nothing else.
DEEPSEEK_ROUTING: Values = dict(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")


def _deepseek_v3(values: Values) -> PreTrainedModel:
    from transformers import DeepseekV3Config

    return _causal(DeepseekV3Config(**{**DEEPSEEK, **DEEPSEEK_ROUTING, **values}))


def _deepseek_v32(index_topk: int) -> PreTrainedModel:
    """One dense layer and three with experts; each picks the tokens to attend to with four heads of 128."""
    from transformers import DeepseekV32Config

    indexer: Values = dict(index_topk=index_topk, index_n_heads=4, index_head_dim=128)
    indexer["num_experts"] = DEEPSEEK["n_routed_experts"]  # transformers looks for it under another name, too
    return _causal(DeepseekV32Config(**DEEPSEEK, **DEEPSEEK_ROUTING, **indexer))


RECIPES: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "qwen3": (lambda: _qwen3({**TINY, "intermediate_size": 192}), TINY_VOCAB),
    "llama": (lambda: _llama({**TINY, "intermediate_size": 192}), TINY_VOCAB),
    "llama_tied": (lambda: _llama({**TINY, **LLAMA_TIED, "intermediate_size": 192}), TINY_VOCAB),
    "llama_linear": (lambda: _llama({**TINY, **LLAMA_LINEAR, "intermediate_size": 192}), TINY_VOCAB),
    "llama_bias": (lambda: _llama({**TINY, "attention_bias": True, "intermediate_size": 192}), TINY_VOCAB),
    "qwen3_tied": (lambda: _qwen3({**TINY, **QWEN3_TIED, "intermediate_size": 192}), TINY_VOCAB),
    "qwen3_moe": (lambda: _qwen3_moe({**TINY, **QWEN3_MOE}), TINY_VOCAB),
    "qwen3_moe_throughout": (lambda: _qwen3_moe({**TINY, **QWEN3_MOE, "mlp_only_layers": []}), TINY_VOCAB),
    "qwen3_moe_plain": (lambda: _qwen3_moe({**TINY, **QWEN3_MOE, "norm_topk_prob": False}), TINY_VOCAB),
    "qwen3_next": (
        lambda: _qwen3_next({**TINY, **TINY_GDN, **TINY_MOE, **NEXT_MOE, "intermediate_size": 192}),
        TINY_VOCAB,
    ),
    "qwen3_next_heads": (
        lambda: _qwen3_next({**TINY, **MANY_GDN, **TINY_MOE, **NEXT_MOE, "intermediate_size": 192}),
        TINY_VOCAB,
    ),
    "qwen3_5": (lambda: _qwen3_5("Qwen3_5", {**TINY, **TINY_GDN, "intermediate_size": 192}), TINY_VOCAB),
    "qwen3_5_moe": (lambda: _qwen3_5("Qwen3_5Moe", {**TINY, **TINY_GDN, **TINY_MOE}), TINY_VOCAB),
    "qwen3_5_text": (lambda: _qwen3_5_text("Qwen3_5", {**TINY, **TINY_GDN, "intermediate_size": 192}), TINY_VOCAB),
    "qwen3_5_moe_text": (lambda: _qwen3_5_text("Qwen3_5Moe", {**TINY, **TINY_GDN, **TINY_MOE}), TINY_VOCAB),
    "qwen3_vl": (lambda: _qwen3_vl({**TINY, "intermediate_size": 192}), TINY_VOCAB),
    "deepseek_v3": (lambda: _deepseek_v3({}), TINY_VOCAB),
    "deepseek_v3_groups": (lambda: _deepseek_v3({"topk_group": 1}), TINY_VOCAB),  # its best experts stand in several
    "deepseek_v3_plain": (lambda: _deepseek_v3({"topk_group": 1, "rope_parameters": PLAIN_ROPE}), TINY_VOCAB),
    "deepseek_v3_dense": (lambda: _deepseek_v3({"first_k_dense_replace": 4}), TINY_VOCAB),  # no layer has experts
    "deepseek_v32": (lambda: _deepseek_v32(16), TINY_VOCAB),
    "deepseek_v32_dense": (lambda: _deepseek_v32(2048), TINY_VOCAB),  # the same weights; picks all there are
    "qwen3_demo": (lambda: _qwen3({**DEMO, "intermediate_size": 768}), DEMO_VOCAB),
    "qwen3_5_demo": (
        lambda: _qwen3_5("Qwen3_5", {**DEMO, **DEMO_GDN, "head_dim": 32, "intermediate_size": 768}),
        DEMO_VOCAB,
    ),
    "qwen3_next_demo": (
        lambda: _qwen3_next({**DEMO, **DEMO_GDN, **DEMO_MOE, **NEXT_MOE, "intermediate_size": 768}),
        DEMO_VOCAB,
    ),
}


def _fill(model: PreTrainedModel) -> None:
    """Random weights at a scale that keeps every layer's part in the logits, whatever the library's own initialiser."""
    import torch

    generator = torch.Generator().manual_seed(WEIGHTS_SEED)

    def normal(weight: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(weight.shape, generator=generator) * scale

    normed = any(name.endswith("q_norm.weight") for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                # Decay per token between 0.2 % and 40 %: some heads forget at once, some remember the whole prompt.
                weight.uniform_(math.log(0.002), math.log(0.5), generator=generator)
            elif name.endswith("dt_bias"):
                weight.copy_(torch.rand(weight.shape, generator=generator))
            elif "norm" in name and weight.dim() == 1:
                weight.add_(normal(weight, 0.1))
                if name.endswith("q_norm.weight"):
                    weight.add_(SHARPNESS - 1)
            elif name.endswith("embed_tokens.weight"):
                weight.copy_(normal(weight, 1.0))  # as large as what a layer adds: the last token stays heard
            elif weight.dim() >= 2:
                weight.copy_(normal(weight, weight.shape[-1] ** -0.5))
                if name.endswith(("q_proj.weight", "q_b_proj.weight")) and not normed:
                    weight.mul_(SHARPNESS)
            else:
                weight.copy_(normal(weight, 0.1))
        for name, bias in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                bias.copy_(normal(bias, 0.02))


def _settle_routing(model: PreTrainedModel) -> None:
    """Let a token's own code choose its experts by a wide margin, and its context only their weights.

    With free random routers some row of every long run stands within rounding of a tie; another order of summation
    then picks another expert and all that follows differs, although nothing is wrong. The code takes the first
    channels of the residual stream, one per expert, which no layer writes to.

    Where one group of experts is chosen, the code likes all experts, less and less: it is groups, and the bias beside
    so many large probabilities, that decide, by margins which only float32 keeps.
    """
    import torch

    experts = _experts(model)
    if not experts:
        return
    chosen: int = model.config.get_text_config().num_experts_per_tok
    generator = torch.Generator().manual_seed(WEIGHTS_SEED + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                ranks = torch.rand(weight.shape[0], experts, generator=generator).argsort(-1)
                one_group = getattr(model.config, "topk_group", None) == 1
                weight[:, :experts] = CODE * (1 - ranks / experts if one_group else ranks < chosen)
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight[..., :experts, :] = 0
            elif name.endswith("mlp.gate.weight"):
                weight[:, experts:] *= 0.2
                weight[:, :experts] = 2 * torch.eye(experts)


def _experts(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0)


def _settle_selection(model: PreTrainedModel) -> None:
    """Let a token's class and its distance choose what DeepSeek-V3.2's indexer picks, by wide margins.

    A query likes seven of eight classes, in each layer other ones; of those it picks the nearest. The border lies among
    distances of 13 to 26, between which scores fall by a good part of their size from one distance to the next: as a
    rule more than the rounding of FP8 keys and queries, and of bfloat16, moves them. The class is
    a code in the residual stream's channels behind those of the experts, which no layer writes to either.
    """
    import torch

    if not hasattr(model.config, "index_topk"):
        return
    first = _experts(model)
    code = slice(first, first + CLASSES)
    generator = torch.Generator().manual_seed(WEIGHTS_SEED + 2)
    one_hot = torch.eye(CLASSES)
    with torch.no_grad():
        embedding: Any = model.get_input_embeddings().weight
        embedding[:, code] = CODE * one_hot[torch.randint(0, CLASSES, (len(embedding),), generator=generator)]
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight[..., code, :] = 0
        for layer in model.model.layers:
            _settle_indexer(model, layer.self_attn, code, generator)


def _settle_indexer(model: PreTrainedModel, attention: Any, code: slice, generator: torch.Generator) -> None:
    """Keys from the class; queries that like classes and distances; heads that relu silences, so that it is heard."""
    import torch

    indexer, rotary = attention.indexer, model.config.qk_rope_head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pairs = torch.full((rotary // 2,), 0.4)
    pairs[4:16] = 1  # those whose angles tell the distances at the border apart
    place, kind = pairs.repeat(2) * normal(rotary), 0.4 * normal(CLASSES, indexer.head_dim - rotary)
    keys = torch.cat([place.expand(CLASSES, -1), kind], 1)
    indexer.wk.weight.zero_()
    indexer.wk.weight[:, code] = keys.T
    disliked = torch.randperm(CLASSES, generator=generator)
    queries = _liking(indexer.k_norm(keys), model.model.rotary_emb.inv_freq, disliked)
    attention.q_a_proj.weight[:CLASSES] = 0
    attention.q_a_proj.weight[:CLASSES, code] = torch.eye(CLASSES)
    loud = 1 + 0.2 * normal(indexer.n_heads).abs()
    loud[1::2] *= -2  # without relu these would turn the order round
    indexer.wq_b.weight.zero_()
    indexer.wq_b.weight[:, :CLASSES] = (loud[:, None, None] * queries.T).flatten(0, 1)
    indexer.weights_proj.weight.zero_()
    indexer.weights_proj.weight[:, code] = 0.5 + torch.rand(indexer.n_heads, CLASSES, generator=generator)


def _liking(keys: torch.Tensor, frequencies: torch.Tensor, disliked: torch.Tensor) -> torch.Tensor:
    """For every class of queries the one whose products with the keys are nearest to what is wanted, of small norm.

    Args:
        keys: [classes, values], of which the first are rotated by a token's place, half against half.
        frequencies: the angle from one place to the next.
        disliked: for every class of queries a class of keys.
    """
    import torch

    distance = torch.arange(512.0, dtype=torch.float64)
    near, border = distance < 12, (distance >= 12) & (distance < 26)
    wanted = torch.where(near, 1.54 - 0.045 * distance, torch.where(border, (26 - distance) / 14, -0.3))
    weight = torch.where(near, 0.3, torch.where(border, 1.0, 0.15))
    angle = -distance[:, None] * frequencies.double()
    cos, sin = angle.cos(), angle.sin()
    half = len(frequencies)
    low, high, rest = keys.double()[:, None].split([half, half, keys.shape[1] - 2 * half], -1)
    rest = rest.expand(-1, len(distance), -1)
    turned = weight[:, None] * torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
    rows = turned.flatten(0, 1)
    normal_equations = rows.T @ rows + 40 * torch.eye(rows.shape[1], dtype=torch.float64)
    liked = 1 - torch.nn.functional.one_hot(disliked, len(keys))
    targets = wanted + 0.5 + 0.8 * liked[..., None]
    products = (weight * targets).flatten(1) @ rows
    return torch.linalg.solve(normal_equations, products.T).T.float()


def _merges(vocab_size: int) -> list[tuple[str, str]]:
    """Enough merges, made by rule, to fill a vocabulary: pairs of letters, or a space and a letter, then a third."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    space = "\u0120"  # how byte-level BPE spells a space
    pairs = [(first, second) for first in space + letters for second in letters]
    triples = [(first + second, third) for third in letters for first, second in pairs]
    return (pairs + triples)[: vocab_size - BYTES - len(SPECIAL)]


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab.update(TOKEN)
    merges = _merges(vocab_size) if vocab_size > TINY_VOCAB else []
    for first, second in merges:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(path)


def _save_processors(path: Path) -> None:
    """How pictures and clips become patches: SGLang wants to know, even if none come."""
    patches: Values = dict(patch_size=16, temporal_patch_size=2, merge_size=2, processor_class="Qwen3VLProcessor",
                           size={"shortest_edge": 32 * 32, "longest_edge": 64 * 32 * 32})  # fmt: skip
    kinds = {
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config": {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, kind in kinds.items():
        (path / f"{name}.json").write_text(json.dumps({**kind, **patches}, indent=2))


def _make(name: str, path: Path) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    build, vocab_size = RECIPES[name]
    model = build().float().eval()
    _fill(model)
    _settle_routing(model)
    _settle_selection(model)
    model.config.dtype = torch.float32
    sizes = [size for start, size in SHARDS.items() if name.startswith(start)]
    shards: Values = {"max_shard_size": sizes[0]} if sizes else {}
    model.save_pretrained(path, **shards)
    _save_tokenizer(path, vocab_size)
    if hasattr(model.config, "vision_config") and name.startswith("qwen3_5"):
        _save_processors(path)


def checkpoint(name: str) -> Path:
    """The directory of the checkpoint `name`, made if it is not there yet (seconds)."""
    if name not in RECIPES:
        raise ValueError(f"no checkpoint {name!r}; there are {', '.join(RECIPES)}")
    made_of = content_hash([Path(__file__)], *(importlib.metadata.version(p) for p in ("torch", "transformers")))
    path = cache_root() / "checkpoints" / made_of / name
    with locked(path.with_name(f"{name}.lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                _make(name, Path(scratch) / name)
                shutil.move(Path(scratch) / name, path)
    return path


def parameters(path: Path) -> int:
    """Parameters of a saved checkpoint, from its weights files' headers."""
    total = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    for name in RECIPES if args.all else args.names:
        path = checkpoint(name)
        print(f"{name}\t{parameters(path) / 1e6:.2f}M parameters\t{path}", flush=True)


if __name__ == "__main__":
    main()
