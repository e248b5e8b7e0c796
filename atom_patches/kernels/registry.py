"""Which implementation of an operation runs, and why.

An operation is one torch operator, `torch.ops.atom_patches.NAME`, so that torch.compile and CUDA graphs see one
node with a known output. Who computes it is decided when it is called:

    torch    the reference, always there
    triton   `PACKAGE.triton_impl`
    aiter    `PACKAGE.aiter_impl`, on ROCm
    engine   the inference engine's own kernel, from the package `kernels` beside the declarations of the engine that
             runs in this process

A provider is a module with a function per operator, named like it and called with the schema's arguments in their
order. It may add `available() -> Verdict` (can it run in this process at all) and, per operator,
`supports_NAME(same arguments) -> Verdict` (can it serve this call). Modules are imported when they are first asked.

`ATOM_KERNEL_<FAMILY>`, else `ATOM_KERNELS`, names the providers to try in order; if none of them can serve, the
call raises. `auto`, the default, never raises: AITER comes first on ROCm; elsewhere the measured ranking of this
operator, shape class and GPU; where nothing was measured, the engine's own kernel, then Triton, or the other way round
where the operation says so; torch at last. Only within a CUDA graph's capture can `auto` find nobody: a reference that
reads the device cannot be captured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from atom_patches.core import log, report, settings
from atom_patches.core.registry import REGISTRY

NAMESPACE = "atom_patches"
PROVIDERS = settings.KERNEL_PROVIDERS
MEASURED = Path(__file__).parent / "measured"

_library = torch.library.Library(NAMESPACE, "DEF")


class Verdict(NamedTuple):
    """Whether a provider can serve, and if not, why; the reason is for a person."""

    ok: bool
    reason: str = ""


YES = Verdict(True)


def no(reason: str) -> Verdict:
    """A refusal."""
    return Verdict(False, reason)


class KernelUnavailable(RuntimeError):
    """None of the providers that the environment asks for can serve a call."""


class Choice(NamedTuple):
    """Who serves a call: the provider, its function, and why it was taken."""

    provider: str
    function: Callable[..., Any]
    reason: str


@dataclass(frozen=True, eq=False)
class Operation:
    """One operator and what the registry must know about it.

    Args:
        package: `__name__` of the package that states the schema; its last part is the family.
        name: the operator's name in `torch.ops.atom_patches`.
        schema: the arguments and results in torch's schema language, without the name and without defaults;
            arguments that are written to are marked `Tensor(a!)`. Outputs alias nothing.
        reference: plain torch; what every provider is compared with.
        fake: the outputs' shapes and dtypes, for torch.compile.
        shape_class: the arguments' class in the measured table, such as "bfloat16 d2048 rows<=16".
        tolerance: dtype name -> (relative, absolute) difference from the reference that a provider may have.
        reference_reads: whether the reference reads a tensor's data on the host, which a CUDA graph cannot capture.
        unspecified: where the first output may hold anything, as a mask of its shape; None: nowhere.
        unordered: whether the entries of a row of the first output may come in any order; None: never.
        unmeasured: whom `auto` tries, in order, for shapes that were not measured on the GPU. The engine's kernel comes
            first, because it is never slower than itself, unless its binding has to wait for the device, or to launch
            more than the engine does.

    `reference`, `fake`, `shape_class`, `unspecified` and `unordered` take the schema's arguments, all of them, by
    position.
    """

    package: str
    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    shape_class: Callable[..., str]
    tolerance: dict[str, tuple[float, float]]
    reference_reads: bool = False
    unspecified: Callable[..., torch.Tensor] | None = None
    unordered: Callable[..., bool] | None = None
    unmeasured: tuple[str, ...] = ("engine", "triton", "torch")
    _operator: torch._ops.OpOverload[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _library.define(self.name + self.schema)
        run = functools.partial(_run, self)
        for key in ("CPU", "CUDA"):
            _library.impl(self.name, run, key)
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self.fake, lib=_library)
        object.__setattr__(self, "_operator", getattr(getattr(torch.ops, NAMESPACE), self.name).default)

    def __call__(self, *arguments: Any) -> Any:
        return self._operator(*arguments)

    @property
    def family(self) -> str:
        """The package's own name: what `ATOM_KERNEL_<FAMILY>` and the command line call it."""
        return self.package.rpartition(".")[2]

    @property
    def operator(self) -> torch._ops.OpOverload[..., Any]:
        """The torch operator."""
        return self._operator

    @property
    def mutated(self) -> tuple[int, ...]:
        """Positions of the arguments that the operator writes to."""
        arguments = torch._C.parse_schema(self.name + self.schema).arguments
        return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def bucket(count: int, bounds: tuple[int, ...]) -> str:
    """The part of a shape class that stands for a size: "<=16" for 9 and (1, 16, 256), ">256" for 300."""
    for bound in bounds:
        if count <= bound:
            return f"<={bound}"
    return f">{bounds[-1]}"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# Who can serve

_offered: str | None = None


def offer_engine(package: str | None) -> None:
    """Name the package that binds an engine's kernels, one module a family, where no engine runs; None: none."""
    global _offered
    _offered = package


def _engine_package() -> str | None:
    return _offered or (f"{REGISTRY.running.declarations}.kernels" if REGISTRY.running else None)


def available(operation: Operation, provider: str, device: torch.device) -> Verdict:
    """Whether `provider` can run `operation` on `device` at all; asked once a process."""
    return _available(operation, provider, device.type, _package(operation, provider))


def supports(operation: Operation, provider: str, arguments: tuple[Any, ...]) -> Verdict:
    """Whether `provider` can serve this call."""
    device = _device(arguments)
    found = available(operation, provider, device)
    if not found.ok:
        return found
    if provider == "torch":
        return _torch_serves(operation, device)
    check = getattr(_loaded(operation, provider), f"supports_{operation.name}", None)
    return YES if check is None else check(*arguments)


def _torch_serves(operation: Operation, device: torch.device) -> Verdict:
    if operation.reference_reads and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return no("the reference reads the device, which a CUDA graph's capture does not allow")
    return YES


def implementation(operation: Operation, provider: str) -> Callable[..., Any]:
    """The function of an available provider."""
    if provider == "torch":
        return operation.reference
    return getattr(_loaded(operation, provider), operation.name)


def engine_call(operation: Operation) -> Callable[..., Any] | None:
    """`timed_NAME` of the engine's module: the call that the engine itself makes, where the operator's promises, such
    as to leave its inputs alone, cost more. The benchmark's baseline."""
    return getattr(_loaded(operation, "engine"), f"timed_{operation.name}", None)


def choose(operation: Operation, arguments: tuple[Any, ...]) -> Choice:
    """Decide who serves this call.

    Raises:
        KernelUnavailable: none of the providers that the environment names can serve it; or nobody can, in a capture.
    """
    variable, asked = settings.kernel_providers(operation.family)
    refusals: list[str] = []
    for provider, why in _candidates(operation, variable, asked, arguments):
        verdict = supports(operation, provider, arguments)
        if verdict.ok:
            return Choice(provider, implementation(operation, provider), why)
        refusals.append(f"{provider}: {verdict.reason}")
    raise KernelUnavailable(
        f"{variable}={','.join(asked)}: none of these can serve {operation.name} here ({'; '.join(refusals)}). "
        f"Add `auto` at the end of the list to fall back, set {settings.kernel_variable(operation.family)} for this "
        "operation alone, or unset the variable."
    )


def _candidates(
    operation: Operation, variable: str, asked: tuple[str, ...], arguments: tuple[Any, ...]
) -> Iterator[tuple[str, str]]:
    """Providers to try in order, each with the reason for its place."""
    for item in asked:
        if item != "auto":
            yield item, f"{variable}={','.join(asked)}"
            continue
        yield from automatic(operation, arguments)


def automatic(operation: Operation, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """Whom `auto` tries for this call, in order, each with the reason for its place."""
    device = _device(arguments)
    if device.type != "cuda":
        yield "torch", f"the reference serves tensors on {device.type}"
        return
    if torch.version.hip is not None:
        yield "aiter", "first on ROCm"
    gpu = torch.cuda.get_device_name(device)
    shape = operation.shape_class(*arguments)
    ranking = _measured(gpu, _engine_package()).get(operation.name, {}).get(shape, [])
    for provider in ranking:
        yield provider, f"the fastest of those measured on {gpu} for {shape} that can serve"
    for provider in operation.unmeasured:
        if provider not in ranking:
            yield provider, f"nothing that can serve was measured on {gpu} for {shape}"


def _run(operation: Operation, *arguments: Any) -> Any:
    choice = choose(operation, arguments)
    _tell(operation.name, choice.provider, choice.reason)
    device = _device(arguments)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return choice.function(*arguments)
    with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
        return choice.function(*arguments)


@functools.cache
def _tell(name: str, provider: str, reason: str) -> None:
    log.logger().debug("kernel %s: %s (%s)", name, provider, reason)
    try:
        report.kernel_chosen(name, provider, reason)
    except report.StateDirError as error:
        log.logger().warning("%s", error)


def _device(arguments: tuple[Any, ...]) -> torch.device:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device
        if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], torch.Tensor):
            return argument[0].device
    raise TypeError("an operation without a tensor argument has no device")


# Loading


def _loaded(operation: Operation, provider: str) -> ModuleType:
    module = _module(_package(operation, provider), operation.family, provider)
    if isinstance(module, Verdict):
        raise KernelUnavailable(f"{operation.name} has no provider {provider!r}: {module.reason}")
    return module


def _package(operation: Operation, provider: str) -> str | None:
    return _engine_package() if provider == "engine" else operation.package


@functools.cache
def _module(package: str | None, family: str, provider: str) -> ModuleType | Verdict:
    """The provider's module, or why there is none."""
    if package is None:
        return no("no inference engine runs in this process")
    name = f"{package}.{family}" if provider == "engine" else f"{package}.{provider}_impl"
    if importlib.util.find_spec(name) is None:
        return no(f"{provider} has no implementation of {family}")
    try:
        return importlib.import_module(name)
    except ImportError as error:  # the engine or Triton is another version than the one that the module is written for
        log.logger().warning("%s cannot be imported and serves nothing: %s", name, error)
        return no(f"{name} cannot be imported: {error}")


@functools.cache
def _available(operation: Operation, provider: str, device_type: str, package: str | None) -> Verdict:
    if provider == "torch":
        return YES
    able = _STATIC[provider](device_type)
    if not able.ok:
        return able
    module = _module(package, operation.family, provider)
    if isinstance(module, Verdict):
        return module
    if not hasattr(module, operation.name):
        return no(f"{module.__name__} has no {operation.name}")
    check = getattr(module, "available", None)
    return YES if check is None else check()


def _triton_runs(device_type: str) -> Verdict:
    if importlib.util.find_spec("triton") is None:
        return no("triton is not installed")
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return no("Triton compiles for GPUs only; TRITON_INTERPRET=1 interprets its kernels on the CPU, slowly")
    return YES


def _aiter_runs(device_type: str) -> Verdict:
    from atom_patches.kernels import aiter_binding

    return aiter_binding.available(device_type)


_STATIC: dict[str, Callable[[str], Verdict]] = {
    "triton": _triton_runs,
    "aiter": _aiter_runs,
    "engine": lambda device_type: YES if device_type != "cpu" else no("the engine's kernels are bound on GPUs only"),
}


@functools.cache
def _measured(gpu: str, engine_package: str | None) -> dict[str, dict[str, list[str]]]:
    """Operator -> shape class -> providers, the fastest first, as `bench --record` wrote them for this GPU.

    A ranking holds beside the kernels of one engine only. Without an engine any will do: its own place is empty.
    """
    path = measured_file(gpu, engine_package.split(".")[1] if engine_package else "*")
    found = sorted(path.parent.glob(path.name))
    return json.loads(found[0].read_text(encoding="utf-8"))["ranking"] if found else {}


def measured_file(gpu: str, engine: str) -> Path:
    """Where the table that was measured on a GPU, named as torch names it, beside an engine's kernels lies."""
    return MEASURED / gpu.replace(" ", "_") / f"{engine}.json"
