"""Prompts that are more than token ids: pictures and clips between the tokens, or embeddings instead of them.

A request of the traffic has `pictures`, a list of [seed, width, height], one for each image token of its `prompt`;
`clips`, a list of [seed, width, height, frames], one for each video token; or `embeddings`, the path of a tensor
[tokens, hidden size]. As a `setup` of an engine, this module lets vLLM's processor of images run beside the installed
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

FRAMES_A_SECOND = 2

#: Seed, width and height; sides that are multiples of 32 are not resized.
Picture = tuple[int, int, int]
#: Seed of its first frame, width, height and frames.
Clip = tuple[int, int, int, int]


def picture(seed: int, width: int, height: int) -> Image:
    """Random colours in squares of 8 pixels, so that patches differ inside, too."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1))


def clip(seed: int, width: int, height: int, frames: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames [frames, height, width, 3], and what a reader of a file would say of them."""
    import numpy as np

    shown = np.stack([np.asarray(picture(seed + frame, width, height)) for frame in range(frames)])
    described = {
        "fps": float(FRAMES_A_SECOND),
        "total_num_frames": frames,
        "duration": frames / FRAMES_A_SECOND,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return shown, described


def pictures(described: Sequence[Picture]) -> list[Image]:
    """The pictures of a request."""
    return [picture(*one) for one in described]


def engine_prompt(request: dict[str, Any]) -> dict[str, Any]:
    """A request's prompt, as vLLM takes it."""
    if "embeddings" in request:
        import torch

        return {"prompt_embeds": torch.load(request["embeddings"])}
    shown: dict[str, Any] = {}
    if request.get("pictures"):
        shown["image"] = pictures(request["pictures"])
    if request.get("clips"):
        shown["video"] = [clip(*one) for one in request["clips"]]
    prompt = {"prompt_token_ids": request["prompt"]}
    return {**prompt, "multi_modal_data": shown} if shown else prompt


def install() -> None:
    """Have transformers' processors take a text whose images come apart.

    vLLM 0.20.2 tokenises such a text by itself, to learn where images belong; transformers 5.24 refuses that.
    """
    from transformers.processing_utils import ProcessorMixin

    ProcessorMixin.validate_inputs = lambda *args, **kwargs: None  # type: ignore[method-assign]
