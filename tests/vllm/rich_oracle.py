"""Transformers in float32 as the oracle for prompts with pictures, and for prompts that are embeddings."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import TOKEN

from tests.vllm.gdn_oracle import CLOSE, Oracle, Prompt
from tests.vllm.rich_prompts import FRAMES_A_SECOND, Clip, Picture, clip, pictures

Answer = tuple[list[int], torch.Tensor]
IMAGE = TOKEN["<|image_pad|>"]
VIDEO = TOKEN["<|video_pad|>"]
BEGIN, END = TOKEN["<|vision_start|>"], TOKEN["<|vision_end|>"]
SHOWN: Prompt = (BEGIN, IMAGE, END)
PLAYED: Prompt = (BEGIN, VIDEO, END)
#: Frames of a clip that become one picture in time.
TOGETHER = 2
#: Side of the square of pixels that becomes one token.
SIDE = 32
MOST_TOKENS = 64


class PictureOracle(Oracle):
    """A vision-language checkpoint, with what processes its pictures; its folder is a copy that has that, too."""

    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        super().__init__(name)
        shutil.copytree(self.path, folder)
        self.path = folder
        size = {"shortest_edge": SIDE * SIDE, "longest_edge": MOST_TOKENS * SIDE * SIDE}
        sizes = dict(patch_size=16, temporal_patch_size=2, merge_size=2, size=size)
        self.images = transformers.Qwen2VLImageProcessor(**sizes)
        self.videos = transformers.Qwen3VLVideoProcessor(**sizes)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        transformers.Qwen3VLProcessor(
            image_processor=self.images,
            tokenizer=self.tokenizer,
            video_processor=self.videos,
            chat_template=self.tokenizer.chat_template,
        ).save_pretrained(folder)

    def inputs(
        self, tokens: Prompt, shown: Sequence[Picture | Clip], new: int = 0
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The prompt with as many image tokens as its pictures take, and what the model needs besides.

        Args:
            tokens: has one image token for each picture, and one video token for each clip.
            shown: pictures and clips.
            new: text tokens that follow the prompt.
        """
        images = [one for one in shown if len(one) == 3]
        clips = [one for one in shown if len(one) == 4]
        features: dict[str, Any] = {}
        if images:
            features |= self.images(images=pictures(images), return_tensors="pt")
        if clips:
            frames = [clip(*one)[0] for one in clips]
            features |= self.videos(videos=frames, do_sample_frames=False, return_tensors="pt")
        ids = self.expanded(tokens, features)
        grown = torch.tensor([ids + [0] * new])
        kinds = (grown == IMAGE).int() + 2 * (grown == VIDEO).int()
        return torch.tensor([ids]), {**features, "mm_token_type_ids": kinds}

    def expanded(self, tokens: Prompt, features: dict[str, Any]) -> list[int]:
        """The prompt with tokens for every part of its pictures, and times in place of a clip's marks."""
        sizes = iter([int(grid.prod()) // 4 for grid in features.get("image_grid_thw", ())])
        clips = iter([self.played(grid) for grid in features.get("video_grid_thw", ())])
        rest, ids = list(tokens), list[int]()
        while rest:
            if tuple(rest[:3]) == PLAYED:
                ids += next(clips)
                del rest[:3]
            else:
                token = rest.pop(0)
                ids += [IMAGE] * next(sizes) if token == IMAGE else [token]
        return ids

    def played(self, grid: torch.Tensor) -> list[int]:
        """A clip in tokens: each picture in time has marks of its own, and its time before them."""
        count, rows, columns = grid.tolist()
        pictured = [BEGIN, *[VIDEO] * (rows * columns // 4), END]
        times = [(TOGETHER * i + (TOGETHER - 1) / 2) / FRAMES_A_SECOND for i in range(count)]
        return [one for time in times for one in (*self.tokenizer.encode(f"<{time:.1f} seconds>"), *pictured)]

    def positions(self, tokens: Prompt, shown: Sequence[Picture]) -> torch.Tensor:
        """The positions of the prompt's rows, by axis: [3, rows]."""
        ids, more = self.inputs(tokens, shown)
        found, _ = self.model.model.get_rope_index(ids, more["mm_token_type_ids"], more["image_grid_thw"])
        return found[:, 0]

    @functools.cache  # noqa: B019 - as many oracles as checkpoints, for the whole session
    def seen(self, tokens: Prompt, shown: tuple[Picture | Clip, ...], new: int) -> Answer:
        """The greedy continuation, and log-probabilities [rows + new - 1, V], of a prompt with pictures."""
        ids, more = self.inputs(tokens, shown)
        with torch.no_grad():
            grown = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                eos_token_id=None, pad_token_id=0, **more,
            )  # fmt: skip
            assert not {IMAGE, VIDEO} & {*grown[0, ids.shape[1] :].tolist()}, "the answer has a token of a picture"
            logits = self.model(grown[:, :-1], **self.inputs(tokens, shown, new - 1)[1]).logits
        return settled(grown[0, ids.shape[1] :].tolist(), logits[0].log_softmax(-1), ids.shape[1])


def embeddings(model: Oracle, tokens: Prompt) -> torch.Tensor:
    """Embeddings near those of the tokens, which are no token's: the channels that choose experts stay as they are."""
    table = model.model.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(len(tokens))
    rows = table[list(tokens)].clone()
    coded: int = getattr(model.model.config.get_text_config(), "num_experts", 0)
    rows[:, coded:] += 0.5 * torch.randn(rows[:, coded:].shape, generator=generator)
    return rows


def embedded(model: Oracle, rows: torch.Tensor, new: int) -> Answer:
    """The greedy continuation, and log-probabilities [rows + new - 1, V], of a prompt of embeddings."""
    whole, chosen = rows[None], list[int]()
    with torch.no_grad():
        for _ in range(new):
            logits = model.model(inputs_embeds=whole).logits[0]
            chosen.append(int(logits[-1].argmax()))
            whole = torch.cat([whole, model.model.get_input_embeddings()(torch.tensor([chosen[-1:]]))], dim=1)
    return settled(chosen, logits.log_softmax(-1), len(rows))


def settled(chosen: list[int], logprobs: torch.Tensor, rows: int) -> Answer:
    """The answer, if it leaves no doubt: every token is the best by far more than rounding.

    Args:
        chosen: the continuation.
        logprobs: after every token but the last.
        rows: of the prompt.
    """
    best = logprobs[rows - 1 :].topk(2)
    assert best.indices[:, 0].tolist() == chosen, "the oracle disagrees with itself"
    margin = (best.values[:, 0] - best.values[:, 1]).min().item()
    assert margin > 2 * CLOSE, f"a prompt of {rows} rows has two best continuations: {margin}"
    return chosen, logprobs
