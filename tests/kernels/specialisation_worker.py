"""What every Triton kernel is launched with, batch by batch; run as a program, it prints `Report` as JSON.

A process of its own, because Triton must not interpret here. Nothing is compiled: Triton's own binder tells the key by
which a launch looks for a compiled kernel. Pointers are left out, whose alignment is the engine's matter.
"""

from __future__ import annotations

import json
import pkgutil
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypedDict
from unittest import mock

import torch
from compile_kernels import CompileOnly, parse_target
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from atom_patches import kernels
from atom_patches.kernels import benchmark, registry

META = torch.device("meta")
BATCHES = (*range(1, 41), 63, 64, 65, 127, 128, 129, 255, 256, 257, 500, 511)
LONG = (*BATCHES, 1000, 1024, 4095, 4096)

Arguments = tuple[Any, ...]


class Report(TypedDict):
    """What the launches showed.

    Attributes:
        untried: operators of the benchmark for which `BATCHED` knows no batches.
        unlaunched: kernels that no operator launched.
        specialised: kernel -> its integers that Triton specialises.
        torn: "operator: kernel" -> run-time arguments for which launches with the same meta-parameters need more than
            one binary, and the types and specialisations that they had.
        variants: "operator: kernel" -> how many meta-parameters it was launched with.
    """

    untried: list[str]
    unlaunched: list[str]
    specialised: dict[str, list[str]]
    torn: dict[str, dict[str, list[str]]]
    variants: dict[str, int]


def lengths(n: int) -> list[int]:
    """Up to 17 sequences of n + 2 rows."""
    return [n + 2] * (1 + n % 17)


def case(module: str, builder: str, *before: Any, **options: Any) -> Callable[[int], Arguments]:
    return lambda n: getattr(bench(module), builder)(*before, n, **options).inputs(META)


def prefill(module: str, builder: str, **options: Any) -> Callable[[int], Arguments]:
    return lambda n: getattr(bench(module), builder)("", lengths(n), **options).inputs(META)


def bench(module: str) -> Any:
    return import_module(f"atom_patches.kernels.{module}")


def logits_paged(n: int) -> Arguments:
    *before, most = bench("sparse_indexer.bench")._paged(n, 64 * n).inputs(META)
    return *before, most - n % 17


BATCHED: dict[str, tuple[Callable[[int], Arguments], ...]] = {
    "add_rms_norm": (case("add_rms_norm.bench", "_case", gemma=False),),
    "causal_conv1d": (prefill("causal_conv1d.bench", "_prefill"),),
    "causal_conv1d_halo": (prefill("causal_conv1d.bench", "_halo"),),
    "causal_conv1d_update": (case("causal_conv1d.bench", "_update"),),
    "causal_conv1d_verify": (case("causal_conv1d.bench", "_verify"),),
    "chunk_gated_delta_rule": (prefill("gated_delta_rule.chunk_bench", "_case"),),
    "chunk_gated_delta_rule_segment": (prefill("gated_delta_rule.chunk_bench", "_case", segment=True),),
    "fused_moe": (
        case("fused_moe.bench", "_moe", shared=False),
        case("fused_moe.bench", "_moe", shared=True),
    ),
    "gated_rms_norm": (case("gated_rms_norm.bench", "_case"),),
    "gather_rows": (lambda n: bench("context_gather.bench")._restore(8 * n, META),),
    "gdn_decode": (case("gdn_chain.decode_bench", "_decode", state_dtype=torch.float32),),
    "gdn_gating": (case("gdn_gating.bench", "_case", dtype=torch.float32),),
    "gdn_prefill": (prefill("gdn_chain.prefill_bench", "_case"),),
    "gdn_prefill_segment": (prefill("gdn_chain.prefill_bench", "_case", segment=True),),
    "gdn_verify": (case("gdn_chain.decode_bench", "_verify", state_dtype=torch.float32),),
    "indexer_cache_gather": (lambda n: bench("sparse_indexer.bench")._gather(1 + n % 17, 64 * n).inputs(META),),
    "indexer_cache_write": (case("sparse_indexer.bench", "_write"),),
    "indexer_logits": (lambda n: bench("sparse_indexer.bench")._ragged(n, 3 * n).inputs(META),),
    "indexer_logits_paged": (logits_paged,),
    "indexer_queries": (case("sparse_indexer.bench", "_queries"),),
    "l2norm": (case("l2norm.bench", "_case"),),
    "linear": (
        lambda n: bench("linear.bench")._case("Qwen3-8B o", 1 + n % 16).inputs(META),
        lambda n: bench("linear.bench")._case("Qwen3.6-35B-A3B out", 1 + n % 16).inputs(META),
    ),
    "local_to_paged": (case("sparse_indexer.bench", "_local"),),
    "merge_attention": (lambda n: bench("merge_attention.bench")._two(n, META),),
    "merge_attention_parts": (lambda n: bench("merge_attention.bench")._parts(1 + n % 17, n, META),),
    "mla_attention": (
        lambda n: bench("mla_attention.bench")._dense(n, 64 * n, 1, "plain").inputs(META),
        lambda n: bench("mla_attention.bench")._dense(1 + n % 17, 64 * n, n, "packed", heads=16).inputs(META),
    ),
    "mla_cache_write": (lambda n: bench("mla_attention.bench")._write(n, "packed").inputs(META),),
    "moe_routing": (case("fused_moe.bench", "_route", deepseek=False),),
    "pack_rows": (lambda n: bench("context_gather.bench")._pack(n, META),),
    "paged_attention": (
        lambda n: bench("paged_attention.bench")._inputs((16, 2, 256, 784), n, 1, 784 * n, META),
        lambda n: bench("paged_attention.bench")._inputs((32, 8, 128, 16), 1 + n % 17, n, 16 * n, META),
    ),
    "qk_norm_rope_cache": (
        case("qk_norm_rope_cache.bench", "_case"),
        case("qk_norm_rope_cache.bench", "_case", mrope=True),
    ),
    "recurrent_gated_delta_rule": (case("gated_delta_rule.recurrent_bench", "_step", state_dtype=torch.float32),),
    "rms_norm": (case("rms_norm.bench", "_case", gemma=False),),
    "scatter_rows": (lambda n: bench("context_gather.bench")._scatter(8 * n, META),),
    "sparse_mla_attention": tuple(
        lambda n, layout=layout, heads=heads: bench("mla_attention.bench")._sparse(n, 16384, layout, heads).inputs(META)
        for layout, heads in (("packed", 128), ("packed", 16), ("scaled", 16))
    ),
    "topk_indices": (lambda n: bench("sparse_indexer.bench")._topk(n, 4096 + n).inputs(META),),
    "verify_gated_delta_rule": (case("gated_delta_rule.recurrent_bench", "_verify", state_dtype=torch.float32),),
}
"""Operator -> ways to make its arguments, as the benchmark makes them, for a batch of any size."""

#: Operators whose arguments are quickly made for thousands of rows too, where kernels are cut another way.
ALSO_LONG = {"fused_moe", "moe_routing", "rms_norm", "add_rms_norm", "gated_rms_norm", "l2norm", "gdn_gating"}


Kinds = dict[str, set[str]]
"""Run-time argument -> every type and specialisation that it had."""


class Launches:
    """Looks at launches instead of running them."""

    def __init__(self) -> None:
        self.operator = ""
        self.specialised: dict[str, set[str]] = defaultdict(set)
        """Kernel -> its integers that Triton specialises."""
        self.by_meta: dict[str, dict[str, Kinds]] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
        """Operator and kernel -> meta-parameters -> all arguments but pointers."""

    def add(self, kernel: JITFunction[Any], arguments: Arguments, options: dict[str, Any]) -> None:
        binder = kernel.device_caches[driver.active.get_current_device()][4]  # pyright: ignore
        bound, kinds, _ = binder(*arguments, debug=False, **options)
        meta = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr} | options
        same = self.by_meta[f"{self.operator}: {kernel.__name__}"][repr(sorted(meta.items()))]
        specialised = self.specialised[full_name(kernel)]
        for parameter, kind in zip(kernel.params, map(str, kinds), strict=True):
            if parameter.is_constexpr or "'*" in kind:
                continue
            same[parameter.name].add(kind)
            if type(bound[parameter.name]) is int and not parameter.do_not_specialize:
                specialised.add(parameter.name)


def observe() -> Launches:
    """Every operator with every batch, on meta tensors, as for an NVIDIA GPU."""
    launches = Launches()

    def run(self: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.add(self, arguments, options)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(driver, "_active", CompileOnly(parse_target("cuda:90"))),
    ):
        for operation in operations():
            launches.operator = operation.name
            for inputs in BATCHED.get(operation.name, ()):
                for n in LONG if operation.name in ALSO_LONG else BATCHES:
                    registry.implementation(operation, "triton")(*inputs(n))
    return launches


def operations() -> list[registry.Operation]:
    found = {case.operation.name: case.operation for family in benchmark.families() for case in benchmark.cases(family)}
    return list(found.values())


def kernel_names() -> set[str]:
    """Triton functions of the package that no other one calls: these are launched."""
    modules = [import_module(m.name) for m in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")]
    functions = {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    called = {id(f.fn.__globals__.get(name)) for f in functions for name in f.fn.__code__.co_names}
    return {full_name(f) for f in functions if id(f) not in called}


def full_name(kernel: JITFunction[Any]) -> str:
    return f"{kernel.fn.__module__}.{kernel.__name__}"


def report() -> Report:
    launches = observe()
    torn: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for kernel, groups in launches.by_meta.items():
        for arguments in groups.values():
            torn[kernel] |= {name: sorted(kinds) for name, kinds in arguments.items() if len(kinds) > 1}
    return {
        "untried": [operation.name for operation in operations() if operation.name not in BATCHED],
        "unlaunched": sorted(kernel_names() - launches.specialised.keys()),
        "specialised": {kernel: sorted(names) for kernel, names in launches.specialised.items()},
        "torn": {kernel: arguments for kernel, arguments in torn.items() if arguments},
        "variants": {kernel: len(groups) for kernel, groups in launches.by_meta.items()},
    }


if __name__ == "__main__":
    print(json.dumps(report()))
