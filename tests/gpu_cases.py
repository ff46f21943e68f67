"""What the GPU's kernels must get right: functions of tensors, each with ragged inputs, by family.

A case is run eagerly in float64 (the truth), eagerly in its own type, and compiled on data that the recording has not
seen: the compiled result may be at most twice as far from the truth as eager's, plus half an ulp. Outputs and arena are
full of NaN before the compiled run, and a second run must give the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import nova

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
FEW = 64  # fewer numbers than these may be lucky in eager
TF32_FLOOR = 2.0**-10  # PyTorch may take a float32 kernel where it is allowed TF32
NOISE = 10  # factor where eager's error is as large as the number: what cancels in exact arithmetic


class Random:
    """Inputs of a case: floats in the case's type, on its device."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator, device=self.device) + 0.25).to(self.dtype)

    def single(self, *shape: int) -> Tensor:
        """float32, whatever the case's type."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device).to(dtype)

    def mask(self, *shape: int, keep: float = 0.7) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) < keep


@dataclass(frozen=True)
class Case:
    """`run(*make(random))`, or `run(module, *make(random))`; with `grad` also the gradients of every float leaf."""

    name: str
    run: Callable[..., Any]
    make: Callable[[Random], tuple]
    dtype: str = "f32"
    grad: bool = False
    exact: bool = False  # no rounding at all: the same bits as eager's
    tf32: bool = False
    module: Callable[[], nn.Module] | None = None
    quick: bool = False
    left: bool = False  # something may be left to PyTorch
    together: bool = False  # eager's error is the largest of all outputs': it may be lucky in one layout
    factor: float = 2.0

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def built(self, device: str) -> Built:
        torch.manual_seed(self.seed)
        module = None
        if self.module is not None:
            with torch.device(device):
                module = self.module().to(self.torch_dtype)
        return Built(self, device, module)


class Built:
    """A case on a device: its step, and inputs as often as wanted."""

    def __init__(self, case: Case, device: str, module: nn.Module | None):
        self.case, self.device, self.module = case, device, module
        self.step = self._step(module)

    def _step(self, module: nn.Module | None) -> Callable[..., Any]:
        function = self.case.run
        call = function if module is None else (lambda *xs: function(module, *xs))
        if not self.case.grad:
            return call
        parameters = [] if module is None else list(module.parameters())

        def with_gradients(*inputs):
            *inputs, dy = inputs
            inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
            y = call(*inputs)
            wanted = [*[x for x in inputs if x.requires_grad], *parameters]
            return (y, *torch.autograd.grad(y, wanted, dy))

        return with_gradients

    def inputs(self, seed: int) -> tuple:
        random = Random(self.case.torch_dtype, self.device, self.case.seed + seed)
        made = self.case.make(random)
        if self.case.grad:
            with torch.no_grad():
                y = self.case.run(*([] if self.module is None else [self.module]), *made)
            made = (*made, random(*y.shape).to(y.dtype))
        return made

    def exact(self, inputs: tuple) -> list[Tensor]:
        """The truth about `inputs`."""
        module = None if self.module is None else copy.deepcopy(self.module).double()
        wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        return leaves(self._step(module)(*wide))


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.detach()]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for item in tree for t in leaves(item)] if isinstance(tree, (list, tuple)) else []


def distance(a: Tensor, b: Tensor) -> float:
    """Relative norm of the difference, where both are finite."""
    a, b = a.double(), b.double()
    both = a.isfinite() & b.isfinite()
    a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item() if a.numel() else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.dtype == torch.bool or not x.dim() else x.view(torch.uint8)


def problems(case: Case, got: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> Iterator[str]:
    """What is wrong with `got`."""
    largest = max((distance(e, x) for e, x in zip(eager, exact, strict=True)), default=0.0) if case.together else 0.0
    for i, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)):
        if g.shape != e.shape or g.dtype != e.dtype:
            yield f"output {i}: {g.dtype} {tuple(g.shape)}, eager {e.dtype} {tuple(e.shape)}"
        elif case.exact or not g.is_floating_point():
            same = torch.equal(g, e) or (g.is_floating_point() and torch.equal(g.isnan(), e.isnan())
                                         and torch.equal(g.nan_to_num(7.0), e.nan_to_num(7.0)))  # fmt: skip
            if not same:
                wrong = (g != e).flatten()
                at = wrong.nonzero()[0].item()
                yield (
                    f"output {i}: {int(wrong.sum())} of {wrong.numel()} differ, the first at {at}: "
                    f"{g.flatten()[at].item()}, eager {e.flatten()[at].item()}"
                )
        else:
            if not torch.equal(g.isfinite(), e.isfinite()) and not torch.equal(g.isfinite(), x.isfinite()):
                yield f"output {i}: {int(g.isnan().sum())} NaN and {int(g.isinf().sum())} infinite, " + (
                    f"eager {int(e.isnan().sum())} and {int(e.isinf().sum())}"
                )
            mine, theirs = distance(g, x), max(distance(e, x), largest)
            epsilon = torch.finfo(g.dtype).eps
            floor = 64 * epsilon if g.dtype == torch.float64 else epsilon / 2  # in float64 eager is its own truth
            if g.numel() < FEW:
                floor *= 4
            if case.tf32:
                floor = TF32_FLOOR
            if not mine <= (NOISE if theirs >= 1 else case.factor) * theirs + floor:
                yield f"output {i} {tuple(g.shape)}: error {mine:.2e}, eager's {theirs:.2e}"


@contextlib.contextmanager
def precision(case: Case) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def poison(step: Any, outputs: list[Tensor]) -> None:
    """Fills the step's arena, and memory that its outputs will probably get, with NaN."""
    for variant in step._variants:
        arena = getattr(variant.executable, "_arena", None)
        if arena is not None:
            arena.tensor.fill_(0xFF)
    held = [torch.full((max(t.nbytes, 1),), 0xFF, dtype=torch.uint8, device=t.device) for t in outputs]
    del held


def check(case: Case, device: str) -> Any:
    """Runs a case on a device; returns the compiled step."""
    with precision(case):
        built = case.built(device)
        step = nova.jit(built.step)
        recorded = leaves(step(*built.inputs(0)))
        inputs = built.inputs(1)
        poison(step, recorded)
        del recorded
        got = leaves(step(*inputs))
        nova.synchronize()
        again = leaves(step(*inputs))
        eager = leaves(built.step(*inputs))
        found = list(problems(case, got, eager, built.exact(inputs)))
    if not all(same_bits(a, b) for a, b in zip(got, again, strict=True)):
        found.append("a second run gives other bits")
    if step.captures != 1:
        found.append(f"captured {step.captures} times")
    left = step._variants[0].executable.left_to_pytorch
    if left and not case.left:
        found.append(f"left to PyTorch: {left}")
    assert not found, "\n".join(found)
    return step


def compile_for(case: Case, target: str) -> list[str]:
    """Compiles a case for a board that need not be here; returns what is wrong with its kernels."""
    with precision(case):
        built = case.built("cpu")
        compiled = nova.capture(built.step, *built.inputs(0)).lower(target).compile()
    found = []
    for name in compiled.kernels:
        for launch in compiled.launches(name):
            spilled = launch.get("spill_stores", 0) + launch.get("spill_loads", 0)
            if spilled or launch.get("stack", 0):
                found.append(f"{name} {launch['symbol']}: {spilled} bytes spilled, stack {launch.get('stack')}")
    plan = compiled.compilation.executable.plan
    if plan.aten_calls and not case.left:
        found.append(f"left to PyTorch: {sorted({call.target for call in plan.aten_calls})}")
    return found
