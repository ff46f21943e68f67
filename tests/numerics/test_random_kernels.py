"""Random groups of row ops, in float32 and bfloat16: they all lower, and compute the same with results in place of
their operands as the plain structured ops do before any of them are fused."""

import random
from collections.abc import Iterator

import pytest
import torch

from nova import mlir, pipeline
from nova.cpu.compile import compile_kernel
from nova.fusion import interpret, outline, readback
from nova.schedule import target as targets
from tests import kernels
from tests.numerics.test_fusion_kernels import TOLERANCE, arguments

ROWS, COLUMNS = 8, 4
FULL, ROW, COLUMN = f"tensor<{ROWS}x{COLUMNS}xf32>", f"tensor<{ROWS}x1xf32>", f"tensor<1x{COLUMNS}xf32>"
NARROW = FULL.replace("f32", "bf16")
TO_OUTLINED = ("simplify", "form-dispatches", "outline-kernels")


class _Program:
    """A random function of `nova` ops on a few arguments; its values stay small, so that all of them compare."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        kinds = [FULL] * self.random.randint(2, 4)
        kinds += [kind for kind in (ROW, COLUMN, NARROW) if self.random.random() < 0.5]
        self.arguments = [(f"%a{n}", kind) for n, kind in enumerate(kinds)]
        self.lines: list[str] = []
        self.made: list[tuple[str, str]] = []
        while len(self.lines) < self.random.randint(3, 14) or not self.made:
            self._add()

    def _add(self) -> None:
        recent = [*self.made[-6:], *self.arguments]
        (a, kind), (b, other) = self.random.choice(recent), self.random.choice(recent)
        form = self.random.choice(["binary"] * 4 + ["cast", "rows", "columns", "tanh", "turned"])
        if form == "binary" and NARROW not in (kind, other):
            result = kind if kind == other else FULL
            self._make(result, f'"nova.{self.random.choice(["add", "mul", "sub"])}"({a}, {b}) : ({kind}, {other})')
        elif form == "cast" and kind in (FULL, NARROW):
            self._make(NARROW if kind == FULL else FULL, f'"nova.cast"({a}) : ({kind})')
        elif form in ("rows", "columns") and kind == FULL:
            dim, result = (1, ROW) if form == "rows" else (0, COLUMN)
            self._make(result, f'"nova.reduce_sum"({a}) {{dims = array<i64: {dim}>, keepdim = true}} : ({kind})')
        elif form == "turned":  # an argument of the step, read across
            a = self.random.choice([name for name, kind in self.arguments if kind == FULL])
            view = f"offset = 0 : i64, size = array<i64: {ROWS}, {COLUMNS}>, stride = array<i64: 1, {ROWS}>"
            self._make(FULL, f'"nova.as_strided"({a}) {{{view}}} : ({FULL})')
        elif form == "tanh":
            self._make(kind, f'"nova.tanh"({a}) : ({kind})')

    def _make(self, kind: str, text: str) -> None:
        value = f"%v{len(self.made)}"
        self.lines.append(f"  {value} = {text} -> {kind}")
        self.made.append((value, kind))

    def text(self) -> str:
        results = self.random.sample(self.made, self.random.randint(1, min(5, len(self.made))))
        results = list(dict.fromkeys([*results, self.made[-1]]))
        arguments = ", ".join(f'{name}: {kind} {{nova.role = "arg"}}' for name, kind in self.arguments)
        kinds = ", ".join(kind for _, kind in results)
        ending = f"  return {', '.join(name for name, _ in results)} : {kinds}"
        return "\n".join([f"func.func @step({arguments}) -> ({kinds}) {{", *self.lines, ending, "}"])


def outlined(seed: int) -> mlir.ir.Module:
    module = mlir.parse(_Program(seed).text())
    for stage in TO_OUTLINED:
        module = pipeline.run_pass(stage, module, pipeline.StepOptions("float32", targets.by_name("zen3")))
    return module


def kernel_texts(seed: int) -> Iterator[str]:
    with mlir.context(), mlir.ir.Location.unknown():
        yield from [kernel.text for kernel in outline.kernels(outlined(seed)) if kernel.kind == "loops"]


def check_in_place(text: str) -> None:
    """Runs a kernel with each of its in-place pairs' results in the operand's buffer."""
    with mlir.context(), mlir.ir.Location.unknown():
        module = mlir.ir.Module.parse(text)
        inputs = list(arguments(outline.kernel_functions(module)[0]))
        stages = {name: str(module) for name, module in pipeline.lower_kernel(text, targets.host())}
        module = mlir.ir.Module.parse(stages["nova-to-linalg"])
        plain = readback.read(outline.kernel_functions(module)[0])
        expected = interpret.run_kernel(plain, [x.clone() for x in inputs])
        loaded = kernels.Loaded(compile_kernel(stages["configure"], targets.host()))
    outputs = [kernels.poisoned(t.shape, kernels.DTYPES[t.dtype]) for t in plain.outs]
    shared = {result: operand for operand, result in plain.inplace}
    places = {operand: result for result, operand in shared.items()}  # an operand has one successor
    for operand, result in places.items():
        outputs[result] = inputs[operand] = inputs[operand].clone()
    loaded.call(inputs, outputs)
    for a, b in zip(outputs, expected, strict=True):
        slack = TOLERANCE if a.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a.float().reshape(-1), b.float().reshape(-1), rtol=slack, atol=slack)


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_every_group_fuses(first: int) -> None:
    for seed in range(first, first + 100):
        for text in kernel_texts(seed):
            names = [name for name, _ in pipeline.lower_kernel(text, targets.by_name("zen3"))]
            assert names[-1] == "configure"


@pytest.mark.parametrize("seed", range(24))
def test_results_in_place_are_the_same(seed: int) -> None:
    for text in kernel_texts(1000 + seed):
        check_in_place(text)
