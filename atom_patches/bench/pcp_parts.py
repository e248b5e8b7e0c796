"""The parts of a prefill on real tensors: for every kind of part its arguments and the call, out of the operations.

Data are random from a fixed seed, and so is the routing. Weights are those of one layer of each kind: layers of a kind
cost the same. Norms have plain weights, for which engines have kernels of their own too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atom_patches.bench.pcp_model import Part, StackShape
from atom_patches.kernels import registry
from atom_patches.kernels.add_rms_norm import ADD_RMS_NORM
from atom_patches.kernels.context_gather import GATHER_ROWS
from atom_patches.kernels.fused_moe import FUSED_MOE, MOE_ROUTING
from atom_patches.kernels.gated_rms_norm import GATED_RMS_NORM
from atom_patches.kernels.gdn_chain.prefill import GDN_PREFILL, GDN_PREFILL_SEGMENT
from atom_patches.kernels.paged_attention import PAGED_ATTENTION
from atom_patches.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE
from atom_patches.kernels.registry import Operation
from atom_patches.runtime.pcp_gdn import head_channels

EPS = 1e-6
POSITIONS = 65536

Call = Callable[..., Any]


class NoKernel(RuntimeError):
    """Only the reference could serve an operation, whose time would say nothing."""


class Kernels:
    """The operations, each served by whom the part asks for; `served` says who that was.

    ``engine`` is the engine's own kernel, called as the engine calls it, and where it has none, or refuses the call,
    whoever ``auto`` takes.
    """

    def __init__(self, asked: str) -> None:
        self.served: dict[str, str] = {}
        self._asked = asked
        self._functions: dict[tuple[str, str], Call] = {}

    def __call__(self, operation: Operation, *arguments: Any) -> Any:
        key = operation.name, operation.shape_class(*arguments)
        if key not in self._functions:
            self._functions[key] = self._choose(operation, arguments)
        return self._functions[key](*arguments)

    def _choose(self, operation: Operation, arguments: tuple[Any, ...]) -> Call:
        refusals: list[str] = []
        for provider in self._candidates(operation, arguments):
            verdict = registry.supports(operation, provider, arguments)
            if not verdict.ok:
                refusals.append(f"{provider}: {verdict.reason}")
                continue
            if provider == "torch" and _on_gpu(arguments):
                raise NoKernel(f"no kernel serves {operation.name} ({'; '.join(refusals)})")
            self.served[operation.name] = provider
            own = registry.engine_call(operation) if provider == "engine" and self._asked == "engine" else None
            return own or registry.implementation(operation, provider)
        raise NoKernel(f"nobody serves {operation.name} ({'; '.join(refusals)})")

    def _candidates(self, operation: Operation, arguments: tuple[Any, ...]) -> Iterator[str]:
        if self._asked == "engine":
            yield "engine"
        yield from (provider for provider, _ in registry.automatic(operation, arguments))


def _on_gpu(arguments: tuple[Any, ...]) -> bool:
    flat = [one for x in arguments for one in (x if isinstance(x, (list, tuple)) else [x])]
    return any(isinstance(x, Tensor) and x.device.type == "cuda" for x in flat)


class Parts:
    """Builds parts; keeps the experts' weights, which are large."""

    def __init__(self, shape: StackShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._dtype = torch.bfloat16 if shape.element_bytes == 2 else torch.float32

    def build(self, part: Part, kernels: Kernels) -> tuple[Call, tuple[Any, ...]]:
        """The call and its arguments; the first of them is a tensor on the device.

        Raises:
            LookupError: there is no such kind of part.
        """
        if part.kind not in KINDS:
            raise LookupError(f"no part is called {part.kind!r}")
        torch.manual_seed(0)
        call, *arguments = getattr(self, f"_{part.kind}")(part, kernels)
        return call, tuple(arguments)

    # GatedDeltaNet

    def _recurrent_in(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        wide = self._weight(s.gdn.channels + s.value_heads * s.head_size, s.hidden)

        def call(x: Tensor, residual: Tensor, norm: Tensor, wide: Tensor, gates: Tensor) -> Any:
            y, _ = kernels(ADD_RMS_NORM, x, residual, norm, EPS, False)
            return functional.linear(y, wide), functional.linear(y, gates)

        return call, *self._residual(part.rows), wide, self._weight(2 * s.value_heads, s.hidden)

    def _recurrent_scan(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        qkv, a, b, weight, conv_state, slots, resumed, starts, decay, bias = self._recurrence(part.rows)
        state = torch.randn(2, s.value_heads, s.head_size, s.head_size, device=self._device)
        return (
            functools.partial(kernels, GDN_PREFILL), qkv, a, b, weight, None, conv_state, state, slots, resumed,
            starts, decay, bias, s.head_size**-0.5, EPS, "silu", 0,
        )  # fmt: skip

    def _recurrent_segment(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        qkv, a, b, weight, conv_state, *rest = self._recurrence(part.rows)
        return (
            functools.partial(kernels, GDN_PREFILL_SEGMENT), qkv, a, b, weight, None, conv_state, *rest,
            s.key_heads, s.head_size, EPS, "silu", 0,
        )  # fmt: skip

    def _deal_out_heads(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        sizes = (s.key_heads, s.value_heads, s.head_size, s.head_size)
        channels = head_channels(*sizes, part.world).to(self._device)
        gates = [self._normal(part.rows, s.value_heads) for _ in range(2)]

        def call(qkv: Tensor, channels: Tensor, *gates: Tensor) -> Tensor:
            shares = [qkv[:, channels], *(gate.unflatten(1, (part.world, -1)) for gate in gates)]
            return torch.cat(shares, dim=2).transpose(0, 1).contiguous()

        return call, self._normal(part.rows, s.gdn.channels), channels, *gates

    def _recurrent_heads(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        """All rows, as they were received, of one rank's share of the heads."""
        s, world = self._shape, part.world
        qkv, a, b, weight, conv_state, slots, resumed, starts, decay, bias = self._recurrence(part.rows, world)
        heads = s.value_heads // world
        state = torch.randn(2, heads, s.head_size, s.head_size, device=self._device)

        def call(received: Tensor, *rest: Any) -> Tensor:
            parts = received.split([qkv.shape[1], heads, heads], dim=1)
            return kernels(GDN_PREFILL, *(one.contiguous() for one in parts), *rest)

        return (
            call, torch.cat([qkv, a, b], dim=1), weight, None, conv_state, state, slots, resumed, starts, decay, bias,
            s.head_size**-0.5, EPS, "silu", 0,
        )  # fmt: skip

    def _collect_heads(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        received = self._normal(part.world, part.rows, s.value_heads // part.world, s.head_size)

        def call(received: Tensor, output: Tensor) -> None:
            output.copy_(received.transpose(0, 1).flatten(1, 2))

        return call, received, self._normal(part.rows, s.value_heads, s.head_size)

    def _recurrent_enter(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        """As the last rank composes the state that it goes on from."""
        s = self._shape
        square = (part.world - 2, s.value_heads, s.head_size, s.head_size)

        def call(state: Tensor, ends: Tensor, maps: Tensor) -> Tensor:
            for end, through in zip(ends, maps, strict=True):
                state = torch.baddbmm(end, state, through)
            return state

        ends, maps = (torch.randn(square, device=self._device) * s.head_size**-0.5 for _ in range(2))
        return call, torch.zeros(square[1:], device=self._device), ends, maps

    def _recurrent_out(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        values = s.value_heads * s.head_size
        core = self._normal(part.rows, s.value_heads, s.head_size)
        # The gate is a part of the projection's output.
        gate = self._normal(part.rows, s.gdn.channels + values)[:, s.gdn.channels :].unflatten(1, core.shape[1:])

        def call(core: Tensor, gate: Tensor, norm: Tensor, out: Tensor) -> Tensor:
            y = kernels(GATED_RMS_NORM, core, gate, norm, EPS, "silu")
            return functional.linear(y.flatten(1), out)

        return call, core, gate, self._ones(s.head_size), self._weight(s.hidden, values)

    def _restore_recurrent(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        received = self._normal(part.rows, s.gdn.channels + 2 * s.value_heads)

        def call(received: Tensor, index: Tensor) -> Any:
            sizes = [s.gdn.channels, s.value_heads, s.value_heads]
            return kernels(GATHER_ROWS, list(received.split(sizes, dim=1)), [], index, False)

        return call, received, torch.arange(part.rows, device=self._device)

    # Full attention

    def _attention_in(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        return self._projected(part.rows, kernels, (None, None, None))

    def _attention_in_cached(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        cache, _ = self._cache(part.rows)
        slots = torch.arange(part.rows, device=self._device)
        return self._projected(part.rows, kernels, (cache[0], cache[1], slots))

    def _projected(self, rows: int, kernels: Kernels, cached: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        s, size = self._shape, self._shape.attention_size

        def call(
            x: Tensor, residual: Tensor, norm: Tensor, wide: Tensor, heads: Tensor, positions: Tensor, table: Tensor,
            *cached: Tensor | None,
        ) -> Any:  # fmt: skip
            y, _ = kernels(ADD_RMS_NORM, x, residual, norm, EPS, False)
            return kernels(
                QK_NORM_ROPE_CACHE, functional.linear(y, wide), positions, table, heads, heads, *cached, None, None,
                s.q_heads, s.kv_heads, size, EPS, False, True, True, None, False,
            )  # fmt: skip

        positions = torch.arange(rows, device=self._device) % POSITIONS
        angles = torch.arange(min(rows, POSITIONS), device=self._device)[:, None]
        angles = angles * 1e-2 ** torch.arange(s.rotary // 2, device=self._device)
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(self._dtype)
        wide = self._weight(2 * (s.q_heads + s.kv_heads) * size, s.hidden)
        return call, *self._residual(rows), wide, self._ones(size), positions, table, *cached

    def _write_keys(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape
        heads = (s.kv_heads, s.attention_size)

        def call(received: Tensor, cache: Tensor, index: Tensor, slots: Tensor) -> None:
            views = [half.unflatten(1, heads) for half in received.chunk(2, dim=1)]
            for rows, pages in zip(kernels(GATHER_ROWS, views, [], index, False), cache, strict=True):
                pages.flatten(0, 1).index_copy_(0, slots, rows)

        cache, _ = self._cache(part.rows)
        order = torch.arange(part.rows, device=self._device)
        return call, self._normal(part.rows, 2 * s.kv_heads * s.attention_size), cache, order, order

    def _move_queries(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        half = -(-part.rows // 2)
        order = torch.arange(part.rows, device=self._device).roll(half)

        def call(rows: Tensor, order: Tensor) -> Any:
            return kernels(GATHER_ROWS, [rows], [], order, False)

        return call, self._normal(part.rows, self._shape.q_heads, self._shape.attention_size), order

    def _attention(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s, size = self._shape, self._shape.attention_size
        lengths = [rows for rows, _ in part.pieces]
        keys = [seen for _, seen in part.pieces]
        cache, table = self._cache(max(keys))
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return (
            functools.partial(kernels, PAGED_ATTENTION),
            self._normal(sum(lengths), s.q_heads, size), cache[0], cache[1],
            table.expand(len(keys), -1).contiguous(), starts.to(self._device),
            torch.tensor(keys, dtype=torch.int32).to(self._device), max(lengths), max(keys), size**-0.5, True, None,
            0.0, None, None, None, False,
        )  # fmt: skip

    def _attention_out(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        columns = self._shape.q_heads * self._shape.attention_size

        def call(core: Tensor, gate: Tensor, out: Tensor) -> Tensor:
            return functional.linear(core * torch.sigmoid(gate), out)

        core, gate = (self._normal(part.rows, columns) for _ in range(2))
        return call, core, gate, self._weight(self._shape.hidden, columns)

    # Experts

    def _experts(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        def call(x: Tensor, residual: Tensor, norm: Tensor, router: Tensor, *weights: Tensor) -> Tensor:
            y, _ = kernels(ADD_RMS_NORM, x, residual, norm, EPS, False)
            chosen = self._routed(kernels, functional.linear(y, router))
            w13, w2, *shared = weights
            return kernels(FUSED_MOE, y, w13, w2, *chosen, None, *shared)

        router = self._weight(self._shape.experts, self._shape.hidden)
        return call, *self._residual(part.rows), router, *self._weights, *self._shared

    def _experts_in(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        """With the shared expert, which every rank has for its own rows."""

        def call(
            x: Tensor, residual: Tensor, norm: Tensor, router: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor
        ) -> Any:
            y, _ = kernels(ADD_RMS_NORM, x, residual, norm, EPS, False)
            gate, up = functional.linear(y, w13).chunk(2, dim=1)
            share = torch.sigmoid(functional.linear(y, shared_gate[None]))
            return functional.linear(y, router), share * functional.linear(functional.silu(gate) * up, w2)

        router = self._weight(self._shape.experts, self._shape.hidden)
        return call, *self._residual(part.rows), router, *self._shared

    def _experts_share(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        """The experts of the rank that has the most to do."""
        s = self._shape
        x, logits = self._normal(part.rows, s.hidden), self._normal(part.rows, s.experts)
        of_rank = torch.arange(s.experts, device=self._device) * part.world // s.experts
        load = of_rank[logits.topk(s.top_k, dim=1).indices.flatten()].bincount(minlength=part.world)
        own = of_rank == load.argmax()
        local = torch.where(own, own.cumsum(0) - 1, -1).int()
        w13, w2 = (weight[: int(own.sum())] for weight in self._weights)

        def call(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, local: Tensor) -> Tensor:
            return kernels(FUSED_MOE, x, w13, w2, *self._routed(kernels, logits), local, None, None, None)

        return call, x, logits, w13, w2, local

    def _routed(self, kernels: Kernels, logits: Tensor) -> tuple[Tensor, Tensor]:
        return kernels(MOE_ROUTING, logits, self._shape.top_k, "softmax", True, None, 1, 1, 1.0)

    # The model's ends

    def _ends(self, part: Part, kernels: Kernels) -> tuple[Any, ...]:
        s = self._shape

        def call(ids: Tensor, table: Tensor, residual: Tensor, norm: Tensor, head: Tensor) -> Tensor:
            y, _ = kernels(ADD_RMS_NORM, functional.embedding(ids, table), residual, norm, EPS, False)
            return functional.linear(y[-1:], head)

        ids = torch.arange(part.rows, device=self._device) * 7919 % s.vocabulary
        table = self._weight(s.vocabulary, s.hidden)
        return call, ids, table, self._normal(part.rows, s.hidden), self._ones(s.hidden), table

    # Tensors

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self._device, dtype=self._dtype)

    def _weight(self, rows: int, columns: int) -> Tensor:
        return self._normal(rows, columns) * columns**-0.5

    def _residual(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's output, the residual stream and the next norm's weight."""
        hidden = self._shape.hidden
        return self._normal(rows, hidden), self._normal(rows, hidden), self._ones(hidden)

    def _recurrence(self, rows: int, shares: int = 1) -> tuple[Tensor, ...]:
        """A sequence that goes on from a state: all arguments but the recurrent states themselves.

        Args:
            shares: into which the heads are dealt out, one of which this is.
        """
        s, device = self._shape, self._device
        heads, channels = s.value_heads // shares, s.gdn.channels // shares
        a, b = self._normal(rows, heads), self._normal(rows, heads)
        return (
            self._normal(rows, channels), a, b, self._normal(channels, s.taps) * s.taps**-0.5,
            self._normal(2, s.taps - 1, channels).mT,
            torch.ones(1, device=device, dtype=torch.int32), torch.ones(1, device=device, dtype=torch.bool),
            torch.tensor([0, rows], dtype=torch.int32).to(device),
            torch.rand(heads, device=device).mul(16).add(1e-3).log(), torch.ones(heads, device=device),
        )  # fmt: skip

    def _cache(self, keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values in pages of a shuffled order, and the table that finds them."""
        s = self._shape
        pages = -(-keys // s.page)
        cache = self._normal(2, pages, s.page, s.kv_heads, s.attention_size)
        return cache, torch.randperm(pages, dtype=torch.int32).to(self._device)[None]

    @functools.cached_property
    def _weights(self) -> tuple[Tensor, Tensor]:
        s = self._shape
        w13 = self._normal(s.experts, 2 * s.expert_width, s.hidden).mul_(s.hidden**-0.5)
        return w13, self._normal(s.experts, s.hidden, s.expert_width).mul_(s.expert_width**-0.5)

    @functools.cached_property
    def _shared(self) -> tuple[Tensor, Tensor, Tensor]:
        w13, w2 = (weight[0].clone() for weight in self._weights)
        return w13, w2, self._ones(self._shape.hidden) * 0.01


KINDS = (
    "recurrent_in", "recurrent_scan", "recurrent_segment", "recurrent_enter", "recurrent_out", "restore_recurrent",
    "deal_out_heads", "recurrent_heads", "collect_heads",
    "attention_in", "attention_in_cached", "write_keys", "move_queries", "attention", "attention_out",
    "experts", "experts_in", "experts_share", "ends",
)  # fmt: skip
