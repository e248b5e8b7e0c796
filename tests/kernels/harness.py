"""One way to hold a provider against the reference, for every operation.

Importing this makes Triton interpret its kernels on a machine without a GPU, where it could not compile them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import aiter_stand_in
import pytest
import torch
from hypothesis import HealthCheck, currently_in_test_context, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from atom_patches import arming
from atom_patches.kernels import contract, registry
from atom_patches.kernels.registry import Operation

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from interpreter_casts import round_casts
        from interpreter_dots import widen_bfloat16_dots

        round_casts()
        widen_bfloat16_dots()
else:
    for engine in arming.ENGINES:
        if importlib.util.find_spec(engine) is not None:
            registry.offer_engine(f"atom_patches.{engine}.kernels")
            break


#: What the running test has been refused, and by whom it was served; see `only_refused`.
refusals: list[str] = []
served: list[str] = []


def only_refused() -> str | None:
    """The reason, if every example of the running test was refused: it has shown nothing."""
    return refusals[0] if refusals and not served else None


def providers(operation: Operation) -> list[str]:
    """Those that can run in this process, the reference among them; on a CPU, AITER is its stand-in."""
    with contextlib.nullcontext() if GPU else aiter_stand_in.installed():
        verdicts = {name: registry.available(operation, name, DEVICE) for name in registry.PROVIDERS}
    broken = [verdict.reason for verdict in verdicts.values() if "cannot be imported" in verdict.reason]
    assert not broken, f"{operation.name}: {broken}"
    return [name for name, verdict in verdicts.items() if verdict.ok]


def examples(count: int) -> Callable[[Any], Any]:
    """Hypothesis settings for a test that interprets or compiles kernels: `count` examples, always the same ones."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def check(operation: Operation, provider: str, arguments: tuple[Any, ...], *, tolerance: tuple[float, float]) -> None:
    """Fail unless `provider` serves the call, agrees with the reference, and writes only what it may.

    Every allocation of the provider holds NaN at first, so that an element left unwritten shows. Functions of AITER and
    of engines are narrower than our schemas and may refuse: the test is skipped, or the generated example passed over,
    and a test all of whose examples were refused counts as skipped. aiter_stand_in/cases.py has what AITER must serve.
    """
    __tracebackhide__ = True
    verdict = registry.supports(operation, provider, arguments)
    if provider in ("aiter", "engine") and not verdict.ok:
        if currently_in_test_context():
            refusals.append(f"{provider} refuses: {verdict.reason}")
            return
        pytest.skip(f"{provider} refuses: {verdict.reason}")
    served.append(provider)
    assert verdict.ok, f"{provider} refuses {operation.name}: {verdict.reason}"
    wanted = contract.results_of(operation, operation.reference, contract.clones(arguments))
    given = contract.clones(arguments)
    with poisoned():
        found = contract.results_of(operation, registry.implementation(operation, provider), given)
    who = f"{operation.name} by {provider}"
    assert list(found) == list(wanted), f"{who}: {list(found)} instead of {list(wanted)}"
    for name, promised in promises(operation, arguments).items():
        assert layout(found[name]) == layout(promised), f"{who}: {name} is not laid out as its fake says"
    for name, got in found.items():
        contract.compare(f"{who}: {name}", got, wanted[name], tolerance)
    touched = contract.touched(operation, arguments, given)
    assert not touched, f"{who} wrote to {', '.join(touched)}"


def spread(x: Tensor) -> Tensor:
    """The vector x as a column of a table, as engines hand over slots and lengths: other values lie in between."""
    return torch.stack([x, torch.zeros_like(x)], dim=1)[:, 0]


def promises(operation: Operation, arguments: tuple[Any, ...]) -> contract.Expected:
    """The outputs as torch.compile is told they will be, without data."""
    with FakeTensorMode() as mode:
        return contract.outputs_of(operation.fake(*pytree.tree_map_only(Tensor, mode.from_tensor, arguments)))


def layout(x: Tensor) -> list[tuple[int, int]]:
    """Size and stride of every dimension in which something can be elsewhere."""
    return [pair for pair in zip(x.shape, x.stride(), strict=True) if pair[0] != 1] if x.numel() else []


def opcheck(operation: Operation, arguments: tuple[Any, ...]) -> None:
    """The operator's schema, mutations and fake implementation are what they say, also under torch.compile."""
    torch.library.opcheck(operation.operator, arguments)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Allocations without a value hold NaN, or the smallest integer, instead of what lay there before."""
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    methods = {name: getattr(Tensor, name) for name in ("new_empty", "new_empty_strided")}

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kw: _fill(allocate(*args, **kw))

    try:
        for name, allocate in plain.items():
            setattr(torch, name, poison(allocate))
        for name, allocate in methods.items():
            setattr(Tensor, name, poison(allocate))
        yield
    finally:
        for name, allocate in plain.items():
            setattr(torch, name, allocate)
        for name, allocate in methods.items():
            setattr(Tensor, name, allocate)


def _fill(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)
