"""How vLLM cuts a compiled ATOM decoder into graphs, and what may go from one piece to the next.

Pieces between vLLM's splitting operations are captured as CUDA graphs, which read their inputs where those were in the
capture. What an operation between them allocates lies elsewhere in each step.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.model_executor.layers.mamba.gdn_linear_attn  # noqa: E402, F401  (registers its operation)
from torch import Tensor, fx, nn  # noqa: E402
from vllm.compilation.backends import split_graph  # noqa: E402
from vllm.config import CompilationConfig, CompilationMode  # noqa: E402

from atom_patches.vllm.adapters.models.attention import OPERATION, PagedAttention, split_graphs  # noqa: E402
from atom_patches.vllm.adapters.models.recurrence import RecurrentLayer  # noqa: E402

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 16, 6


def config_with(splitting_ops: list[str] | None = None) -> Any:
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, splitting_ops=splitting_ops)
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    config: Any = SimpleNamespace(compilation_config=compilation)
    split_graphs(config)
    return config


class Pieces:
    """A module, compiled and split as vLLM does it."""

    def __init__(self, run: nn.Module, *inputs: Tensor) -> None:
        self.whole, items = split_graph(_traced(run, inputs), config_with().compilation_config.splitting_ops)
        self.items = sorted(items, key=lambda one: one.graph_id)
        self.between = {item.submod_name for item in items if item.is_splitting_graph}

    def names(self) -> list[str]:
        """The operation of each piece between graphs; "graph" for the others."""
        found: list[str] = []
        for item in self.items:
            nodes = getattr(self.whole, item.submod_name).graph.nodes
            called = [str(node.target) for node in nodes if node.op == "call_function"]
            found.append(called[0].rpartition(".")[2] if item.submod_name in self.between else "graph")
        return found

    def moving(self) -> list[str]:
        """What an operation between graphs allocates and a graph reads."""
        found: list[str] = []
        for node in self.whole.graph.nodes:
            if node.op == "call_module" and node.target in self.between:
                readers = [user for user in _readers(node) if user.target not in self.between]
                found += [f"{node.target} -> {user.target}" for user in readers]
        return found


def _traced(run: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """The module's graph as Dynamo hands it to vLLM; nothing is computed."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        graphs.append(graph)
        return lambda *arguments: (torch.empty(0),)

    torch._dynamo.reset()
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"), torch._dynamo.config.patch(disable=False):
        torch.compile(run, backend=keep, dynamic=False, fullgraph=True)(*inputs)
    [graph] = graphs
    return graph


def _readers(node: fx.Node) -> list[fx.Node]:
    """Modules that read a node, or one of its parts."""
    found: list[fx.Node] = []
    for user in node.users:
        found += [user] if user.op in ("call_module", "output") else _readers(user)
    return found


class Attends(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        width = (HEADS * (2 if gated else 1) + 2 * KV_HEADS) * SIZE
        self.before, self.after = nn.Linear(32, width), nn.Linear(HEADS * SIZE, 32)
        self.gated = gated
        self.layer: Any = SimpleNamespace(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, layer_name="model.layers.0.self_attn.attn"
        )
        said = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": SIZE, "mrope_section": None}
        self.rotary: Any = SimpleNamespace(table=torch.randn(64, SIZE), arguments=lambda heads, norms: said)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        qkv = self.before(hidden)
        return self.after(PagedAttention.attend(self.layer, qkv, positions, self.rotary, None, self.gated))


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 48), nn.Linear(32, 32)
        self.layer: Any = SimpleNamespace(_shapes=((3, 48), (4, 8, 8)), _prefix="model.layers.0.linear_attn")

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.before(hidden)
        return self.after(RecurrentLayer.__call__(self.layer, mixed, mixed[:, :4], mixed[:, 4:8]).flatten(1))


@pytest.mark.parametrize("gated", [False, True])
def test_full_attention(gated: bool) -> None:
    """Nothing runs between the rotation and attention, and graphs get only what lies still."""
    pieces = Pieces(Attends(gated), torch.randn(ROWS, 32), torch.arange(ROWS))
    assert pieces.names() == ["graph", "rotate_into_cache", "unified_attention_with_output", "graph"]
    assert pieces.moving() == []


def test_a_recurrent_layer() -> None:
    pieces = Pieces(Recurs(), torch.randn(ROWS, 32))
    assert pieces.names() == ["graph", "gdn_attention_core", "graph"]
    assert pieces.moving() == []


class Moves(nn.Module):
    """What the tests above look for: a graph reads the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(64, SIZE)

    def forward(self, qkv: Tensor, positions: Tensor) -> Tensor:
        heads = (HEADS, KV_HEADS, SIZE)
        queries, _ = torch.ops.atom_patches.rotate_into_cache(
            qkv * 2, positions, self.table, None, None, *heads, 0.0, False, False, None, "a layer"
        )
        return queries * 2


def test_what_moves_is_found() -> None:
    pieces = Pieces(Moves(), torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * SIZE), torch.arange(ROWS))
    assert len(pieces.moving()) == 1


def test_graphs_are_split_once_and_only_where_vllm_splits_them() -> None:
    config = config_with()
    split_graphs(config)
    assert config.compilation_config.splitting_ops.count(OPERATION) == 1
    assert config_with(splitting_ops=[]).compilation_config.splitting_ops == []
    unset: Any = SimpleNamespace(compilation_config=SimpleNamespace(splitting_ops=None))
    split_graphs(unset)
    assert unset.compilation_config.splitting_ops is None
