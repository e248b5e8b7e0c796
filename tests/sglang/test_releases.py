"""What SGLang's releases do in different ways, and the one place in which each is met, in the installed release.

No engine is started: configurations, batches and layers are made by themselves.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sglang.environment import environment, options

#: Run in a process of its own, on the stand-in: what SGLang publishes is a process's.
PUBLISHED = """
import inspect, sys
from types import SimpleNamespace
from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.server_args import ServerArgs
from atom_patches.sglang.adapters import server_args
from atom_patches.sglang.models import _config, prefill_graphs

def configured(**more):
    args = ServerArgs(**{**OPTIONS, **more})
    getattr(args, "resolve_once", lambda: None)()
    return args
"""

CAPTURED = """
args = configured()
get_context().set_server_args(args)
get_exec().graph.cuda_graph_config.prefill.backend = "breakable"
assert check_cuda_graph_backend("prefill", "breakable")
answer = prefill_graphs.without_graphs(lambda *, model_runner, eager_runner: eager_runner)
assert answer(model_runner=SimpleNamespace(server_args=args), eager_runner=7) == 7
assert not check_cuda_graph_backend("prefill", "breakable") and check_cuda_graph_backend("prefill", "disabled")
"""

RANKS = """
args = configured(tp_size=2, dp_size=2, enable_dp_attention=True)
assert server_args.attention_ranks(server_args.resolved(args)) == 2
assert server_args.resolved(args).tp_size == 2
assert tuple(server_args.attention_backends(args)) == ("torch_native", "torch_native")
assert server_args.model_config(args).hf_config.architectures == ["LlamaForCausalLM"]
assert server_args.mamba_cache_chunk_size(args) == 64
"""

REFUSED = """
args = configured()
assert list(_config.unserved(args, "llama")) == []
later = [name for name in _config.LATER if hasattr(args, name)]
assert later == (list(_config.LATER) if hasattr(args, "resolve_once") else []), later
assert server_args.is_record(server_args.resolved(args)) is bool(later)
assert hasattr(args, "startup_weight_load_mode") is bool(later) and args.enable_mis is False
"""


def run(text: str) -> None:
    from checkpoints import checkpoint

    given = options(model_path=str(checkpoint("llama_tied")))
    script = f"OPTIONS = {given!r}\n{PUBLISHED}{text}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_no_prefill_is_captured() -> None:
    """Nor do schedulers of data-parallel ranks think so, which look at what is published."""
    run(CAPTURED)


def test_settings_are_those_that_sglang_runs_with() -> None:
    run(RANKS)


def test_options_that_are_refused_by_name_are_sglang_s() -> None:
    run(REFUSED)


def test_recurrent_layers_run_the_mode_that_was_planned() -> None:
    """A rank that decodes while another extends may be told to extend, too, by one token a request."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_patches.sglang.adapters.gdn_binding import planned_mode

    plain: Any = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    assert planned_mode(plain) is ForwardMode.EXTEND
    told: Any = SimpleNamespace(forward_mode=ForwardMode.EXTEND, logical_forward_mode=ForwardMode.DECODE)
    assert planned_mode(told) is ForwardMode.DECODE


@pytest.mark.parametrize("asked", [False, True])
def test_weights_whose_rows_sglang_lays_out_anew_are_not_taken_as_they_are_stored(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.environ import envs

    from atom_patches.sglang.adapters import experts

    name = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
    known = hasattr(envs, name)
    monkeypatch.setenv(name, "1" if asked else "0")
    assert experts._interleaves() is (asked and known)


def test_a_head_of_its_own_is_refused() -> None:
    """Where SGLang answers with more than the head of the language model, or makes that head of something else."""
    from atom_patches.sglang.adapters.classes import refuse_headless, refuse_other_heads

    refuse_other_heads(["lm_head.weight", "model.norm.weight"])
    with pytest.raises(ValueError, match=r"pooler\.head\.weight.*leave ATOM_MODELS out"):
        refuse_other_heads(["pooler.head.weight", "model.norm.weight"])
    refuse_headless("model.language_model.norm.weight")
    with pytest.raises(ValueError, match=r"without a head.*leave ATOM_MODELS out"):
        refuse_headless("language_model.norm.weight")
