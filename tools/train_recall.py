"""Train the recall model: a small hybrid on which lost context shows as a wrong token.

A prompt says which map it will ask for, writes several maps, one per mode and edge by edge, and then walks the one:

    A0  M2 = a b = c d = e a ...  M0 = c e = d b ...  M2 = b c ...  ? c e b d
    ^ask   ^mode   ^edge: c -> d                                    ^a walk: each token follows an edge of mode 0

Every mode's edges form one cycle, so a walk can be continued for many greedy tokens and each of them looks up an
edge far back in the prompt. All modes walk the same symbols, each in another order. What is asked for stands only at
the start of the prompt, the mode only at the head of a long segment: nothing but the recurrent layers, which all come
before the one attention layer, can carry them to where they are needed, and nothing but attention has the capacity
to look an edge up. Losing either shows.

    python tools/train_recall.py train --out tests/assets/recall    # minutes on one core
    python tools/train_recall.py measure tests/assets/recall        # accuracy, and accuracy with context removed
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

SYMBOLS = 48
MODES = 4
MODE0 = SYMBOLS
ASK0 = MODE0 + MODES
EDGE = ASK0 + MODES
WALK = EDGE + 1
VOCAB = 64
IGNORE = -100


@dataclasses.dataclass(frozen=True)
class Shape:
    """How much one prompt holds: modes, edges of each, segments that a mode's edges are cut into, tokens a walk."""

    modes: int
    edges: int
    segments: int
    walks: int
    walk: int


# Each stage starts when the one before is answered well; the last is what the model is measured on.
STAGES = (
    Shape(modes=1, edges=6, segments=1, walks=4, walk=5),
    Shape(modes=2, edges=8, segments=1, walks=4, walk=6),
    Shape(modes=3, edges=12, segments=2, walks=4, walk=8),
    Shape(modes=4, edges=16, segments=2, walks=4, walk=10),
    Shape(modes=4, edges=24, segments=2, walks=4, walk=12),
)
ADVANCE_AT = 0.97
FINISH_AT = 0.998


@dataclasses.dataclass(frozen=True)
class Prompt:
    """`tokens` ends with a walk's first symbol; `answer` is how the walk goes on; `edges[i]` are the positions of the
    edge (its `=`) that `answer[i]` needs."""

    tokens: list[int]
    answer: list[int]
    edges: list[int]


def _write_maps(
    shape: Shape, asked: int, rng: random.Random
) -> tuple[list[int], list[dict[int, int]], list[dict[int, int]]]:
    """The prompt up to its walks, each mode's successors, and where in the prompt each symbol's edge stands."""
    successors: list[dict[int, int]] = []
    segments: list[tuple[int, list[int]]] = []
    symbols = rng.sample(range(SYMBOLS), shape.edges)
    for mode in range(shape.modes):
        cycle = rng.sample(symbols, len(symbols))
        successors.append(dict(zip(cycle, cycle[1:] + cycle[:1], strict=True)))
        sources = rng.sample(cycle, len(cycle))
        step = math.ceil(len(sources) / shape.segments)
        segments += [(mode, sources[i : i + step]) for i in range(0, len(sources), step)]
    rng.shuffle(segments)
    tokens = [ASK0 + asked]
    places: list[dict[int, int]] = [{} for _ in range(shape.modes)]
    for mode, sources in segments:
        tokens.append(MODE0 + mode)
        for source in sources:
            places[mode][source] = len(tokens)
            tokens += [EDGE, source, successors[mode][source]]
    return tokens, successors, places


def make_prompt(shape: Shape, rng: random.Random) -> Prompt:
    """One prompt with one walk at its end."""
    mode = rng.randrange(shape.modes)
    tokens, successors, places = _write_maps(shape, mode, rng)
    at = rng.choice(list(successors[mode]))
    tokens += [WALK, at]
    answer: list[int] = []
    edges: list[int] = []
    for _ in range(min(shape.walk, shape.edges - 1)):
        edges.append(places[mode][at])
        at = successors[mode][at]
        answer.append(at)
    return Prompt(tokens, answer, edges)


def _training_row(shape: Shape, rng: random.Random) -> tuple[list[int], list[int]]:
    mode = rng.randrange(shape.modes)
    tokens, successors, _ = _write_maps(shape, mode, rng)
    labels = [IGNORE] * len(tokens)
    for walk in range(shape.walks):
        if walk and rng.random() < 0.5:
            mode = rng.randrange(shape.modes)
            tokens.append(ASK0 + mode)
            labels.append(IGNORE)
        at = rng.choice(list(successors[mode]))
        tokens += [WALK, at]
        labels += [IGNORE, successors[mode][at]]
        for _ in range(min(shape.walk, shape.edges - 1)):
            at = successors[mode][at]
            tokens.append(at)
            labels.append(successors[mode][at])
    return tokens, labels


def _batch(shape: Shape, rows: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    pairs = [_training_row(shape, rng) for _ in range(rows)]
    width = max(len(tokens) for tokens, _ in pairs)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in pairs])
    labels = torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in pairs])
    return ids, labels


def make_model() -> Qwen3NextForCausalLM:
    config = Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, max_position_embeddings=1024, intermediate_size=128,
        tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_conv_kernel_dim=4, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
        bos_token_id=None, eos_token_id=VOCAB - 1, pad_token_id=VOCAB - 2,
    )  # fmt: skip
    config.full_attention_interval, config.partial_rotary_factor = 4, 0.25  # what SGLang reads, not transformers
    model = Qwen3NextForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # The library starts with states that fade within a token or two; what has to be carried here is far back.
            if name.endswith("A_log"):
                weight.uniform_(math.log(0.001), math.log(0.5))
    return model


def train(out: Path, seed: int, budget_s: float) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = make_model().train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started, stage, step, right = time.monotonic(), 0, 0, 0.0
    while time.monotonic() - started < budget_s:
        step += 1
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 100) * (0.3 if stage == len(STAGES) - 1 and right > 0.98 else 1.0)
        ids, labels = _batch(STAGES[stage], 16, rng)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=IGNORE)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        asked = labels != IGNORE
        right = 0.95 * right + 0.05 * (logits.argmax(-1) == labels)[asked].float().mean().item()
        if step % 50 == 0:
            print(f"{time.monotonic() - started:6.0f} s  step {step}  stage {stage}  width {ids.shape[1]}  "
                  f"loss {loss.item():.4f}  right {right:.4f}", flush=True)  # fmt: skip
        if right > (FINISH_AT if stage == len(STAGES) - 1 else ADVANCE_AT):
            if stage == len(STAGES) - 1:
                break
            stage, right = stage + 1, 0.0
    save(model, out)


def save(model: Qwen3NextForCausalLM, out: Path) -> None:
    """Write the weights in half precision; they are used in float32, so rounding happens once, here."""
    out.mkdir(parents=True, exist_ok=True)
    half = model.half()
    half.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


Ablation = Callable[[Qwen3NextForCausalLM, Prompt], Any]


@torch.no_grad()
def _walk(model: Qwen3NextForCausalLM, prompt: Prompt, cut: int, keep_state: bool, keep_kv: bool) -> list[bool]:
    """Greedy answers when the prompt is run in two pieces and, between them, a kind of context is lost."""
    first = model(input_ids=torch.tensor([prompt.tokens[:cut]]), use_cache=True)
    cache = first.cache
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            if not keep_state:
                layer.recurrent_states = {k: torch.zeros_like(v) for k, v in layer.recurrent_states.items()}
        elif not keep_kv:
            layer.values = torch.zeros_like(layer.values)
    logits = model(input_ids=torch.tensor([prompt.tokens[cut:]]), cache=cache, use_cache=True).logits[0, -1]
    found: list[bool] = []
    for want in prompt.answer:
        got = int(logits.argmax())
        found.append(got == want)
        # The right token is fed back, so that each answer is judged by itself.
        logits = model(input_ids=torch.tensor([[want]]), cache=cache, use_cache=True).logits[0, -1]
    return found


def measure(path: Path, prompts: int, seed: int) -> None:
    model = Qwen3NextForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rng = random.Random(seed)
    made = [make_prompt(STAGES[-1], rng) for _ in range(prompts)]
    lengths = [len(p.tokens) for p in made]
    print(f"{prompts} prompts of {min(lengths)}-{max(lengths)} tokens, {sum(len(p.answer) for p in made)} answers")
    rows = (
        ("nothing lost", True, True),
        ("recurrent state lost at the cut", False, True),
        ("keys and values before the cut lost", True, False),
    )
    for name, keep_state, keep_kv in rows:
        before: list[bool] = []
        after: list[bool] = []
        cuts = random.Random(seed)
        for prompt in made:
            cut = cuts.randrange(len(prompt.tokens) // 4, 3 * len(prompt.tokens) // 4)
            for ok, edge in zip(_walk(model, prompt, cut, keep_state, keep_kv), prompt.edges, strict=True):
                (before if edge < cut else after).append(ok)
        total = before + after
        print(f"{name}: {sum(total) / len(total):.4f} (edge before the cut {sum(before) / len(before):.4f}, "
              f"after it {sum(after) / len(after):.4f})", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--minutes", type=float, default=60)
    measuring = commands.add_parser("measure")
    measuring.add_argument("path", type=Path)
    measuring.add_argument("--prompts", type=int, default=40)
    measuring.add_argument("--seed", type=int, default=10_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "train":
        train(args.out, args.seed, args.minutes * 60)
    else:
        measure(args.path, args.prompts, args.seed)


if __name__ == "__main__":
    main()
