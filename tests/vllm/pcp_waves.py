"""The traffic of the prefill-context-parallel tests, in waves, and the engine options that make it hard to serve."""

from __future__ import annotations

from typing import Any

from tests.vllm.gdn_oracle import Prompt, oracle, prompt
from tests.vllm.pcp_engines import MIXED, NEW, Request, request, wave

LONG = prompt(150, seed=20)

#: Requests come while others decode, so steps mix decodes, whole prompts and chunks; two are aborted.
STAGGERED = [
    request(LONG),
    request(prompt(90, seed=30), at=2),
    request(prompt(140, seed=8), at=3, abort_at=6),
    request(prompt(1, seed=30), at=4),
    request(prompt(41, seed=10), at=5, max_tokens=1),
    request(prompt(200, seed=11), at=5, abort_at=6),
    request(prompt(23, seed=30), at=7),
]
SHORTEST = wave([prompt(n, seed=40) for n in (1, 2, 40)], max_tokens=1)
SCORED = wave([prompt(n, seed=50) for n in (33, 150, 2)], prompt_logprobs=2)
#: A batch of seeded requests only: vLLM's CPU sampler ignores seeds in a batch that has an unseeded one.
SEEDED = [
    request(prompt(60, seed=15), temperature=0.9, seed=11, n=2),
    request(prompt(9, seed=16), temperature=0.7, seed=12, top_p=0.9),
]
STEERED = [
    request(prompt(70, seed=17), repetition_penalty=1.3, presence_penalty=0.4),
    request(prompt(30, seed=18), choice=["alpha", "beta"], detokenize=True, ignore_eos=False),
]
#: The waves that have an oracle, and those that are compared with the unsplit engine alone.
GREEDY = [wave(), STAGGERED, SHORTEST, SCORED]
EVERYTHING = [*GREEDY, SEEDED, STEERED]

#: More than the blocks of a crowded engine hold at once, so its scheduler has to preempt.
CROWDED = wave([prompt(n, seed) for n, seed in ((100, 60), (120, 60), (90, 60), (110, 61))], max_tokens=40)
#: Sent after the crowd, so that the shortest prompts begin in state slots that others have left.
TINY = wave([tokens for tokens in MIXED if len(tokens) <= 5])
#: A prompt of one token by itself, so that nothing else in its step is a prefill.
ALONE = wave(MIXED[:1])

#: Steps of fewer tokens than most prompts have.
CHUNKED: dict[str, Any] = dict(max_num_batched_tokens=48)
CACHING: dict[str, Any] = dict(max_num_batched_tokens=96, block_size=32, enable_prefix_caching=True)
#: Too few blocks for the crowd: of a dense model, and of a hybrid one, whose states take some.
SMALL: dict[str, Any] = dict(max_model_len=192, num_gpu_blocks_override=24, block_size=16)
SMALL_PAGES: dict[str, Any] = dict(max_model_len=192, num_gpu_blocks_override=16, block_size=32)


def cached_waves(name: str) -> list[list[Request]]:
    """Prompts that share a prefix; then the same again, and conversations that go on from their answers."""
    short = prompt(60, seed=3)
    first: list[Prompt] = [LONG, LONG[:140] + prompt(9, seed=4), short]
    grown = [old + tuple(oracle(name).answer(old, NEW)[0]) + prompt(11, seed=5) for old in (LONG, short)]
    return [wave(first), wave([*first, *grown]), wave([LONG[:130] + prompt(40, seed=6)])]
