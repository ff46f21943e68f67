"""Runs level-2 kernels and outlined steps on tensors, slowly and plainly: to compare levels 1 and 2 without code
generation.

    outputs = run_step(outlined_module, inputs, wide=True)      # every float in float64, nothing rounded

Each structured op is evaluated for all its loops at once: a load is an indexed read broadcast over the loops, a
reduction a PyTorch reduction over its axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor as Torch

from nova.dialect.types import describe
from nova.errors import CompileError
from nova.fusion import outline, readback, records
from nova.fusion.kernel import Expr, Index, Kernel, Linear, Out, Structured, Tensor
from nova.mlir import ir

_TYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "i1": torch.bool, "index": torch.int64,
}  # fmt: skip
_FLOATS = ("f32", "f64", "bf16", "f16")


class Raised(Exception):
    """A nova.check found a bad value."""


class _Evaluator:
    def __init__(self, kernel: Kernel, memory: dict[Tensor, Torch], sizes: Sequence[int], wide: bool, seed: Philox):
        self.kernel, self.memory, self.sizes, self.wide, self.philox = kernel, memory, sizes, wide, seed

    def dtype(self, type_: str) -> torch.dtype:
        return torch.float64 if self.wide and type_ in _FLOATS else _TYPES[type_]

    def run(self) -> None:
        for op in self.kernel.ops:
            self.op(op)

    def axis(self, op: Structured, loop: int) -> Torch:
        """The loop's values, along its own axis of the op's loops."""
        if loop in self.kernel.tiles:
            n, size = self.kernel.tiles[loop]
            return self.axis(op, n) // size
        shape = [1] * len(op.loops)
        shape[op.loops.index(loop)] = -1
        return torch.arange(self.sizes[loop]).view(shape)

    def linear(self, op: Structured, item: Linear) -> Torch:
        total = torch.full([1] * len(op.loops), item.const, dtype=torch.int64)
        for loop, coefficient in item.terms:
            total = total + self.axis(op, loop) * coefficient
        return total

    def index(self, op: Structured, index: Index) -> tuple[Torch, ...]:
        return tuple(self.linear(op, item) for item in index)

    def read(self, tensor: Tensor) -> Torch:
        if tensor not in self.memory:
            shape = [self.sizes[0] if n < 0 else n for n in tensor.shape]
            fill = float("nan") if tensor.dtype in _FLOATS else 85 if tensor.dtype != "i1" else True
            self.memory[tensor] = torch.full(shape, fill, dtype=self.dtype(tensor.dtype))
        return self.memory[tensor]

    def op(self, op: Structured) -> None:
        values: dict[Expr, Torch] = {}
        for node in op.nodes():
            values[node] = self.node(op, node, [values[arg] for arg in node.args])
        full = [self.sizes[loop] for loop in op.loops]
        axes = [op.loops.index(loop) for loop in sorted(op.reduced)]
        for out in op.outs:
            target = self.read(out.tensor)
            value = values[out.value].expand(full)
            tiled = next((loop for item in out.index for loop, _ in item.terms if loop in self.kernel.tiles), None)
            if tiled is not None:
                self.tile_reduction(op, out, tiled, value, target)
                continue
            if out.combine is not None:
                value = _reduce(value, axes, out.combine, out.init)
            position = self.index(op, out.index)
            shape = (
                torch.broadcast_shapes(*(p.shape for p in position)) if position else torch.Size([1] * len(op.loops))
            )
            kept = [1 if axis in axes else n for axis, n in enumerate(full)]
            if position:
                target[tuple(p.expand(kept) for p in position)] = value.expand(kept).to(target.dtype)
            else:
                assert len(shape) == len(op.loops)
                target[()] = value.reshape(()).to(target.dtype)

    def tile_reduction(self, op: Structured, out: Out, loop: int, value: Torch, target: Torch) -> None:
        """A reduction over tiles of a loop, one tile after the other."""
        n, size = self.kernel.tiles[loop]
        axis = op.loops.index(n)
        parts = [_reduce(part, [axis], out.combine or "", out.init) for part in value.split(size, axis)]
        combined = torch.cat(parts, axis)
        # the target's dimensions are the op's loops with the tile's number in place of n, in some order
        order = [op.loops.index(n if item.terms[0][0] == loop else item.terms[0][0]) for item in out.index]
        target.copy_(combined.permute(order).reshape(target.shape))

    def node(self, op: Structured, node: Expr, args: list[Torch]) -> Torch:
        if node.op == "load":
            tensor, index = node.attr
            memory = self.read(tensor)
            return memory[self.index(op, index)] if index else memory.reshape([1] * len(op.loops))
        if node.op == "linear":
            return self.linear(op, node.attr)
        if node.op == "const":
            return torch.full([1] * len(op.loops), node.attr, dtype=self.dtype(node.type))
        if node.op == "tensor.extract":
            return self.read(node.attr)[tuple(torch.broadcast_tensors(*args))]
        if node.op == "nova.check":
            if bool(args[0].any()):
                raise Raised(self.kernel.attrs.get("nova.raises", "bad value"))
            return args[0]
        if node.op == "nova.philox":
            return self.philox(args[0], args[1], node.attr)
        function = OPS.get(node.op)
        if function is None:
            raise CompileError(f"{node.op} has no interpretation")
        if node.op in _CASTS:
            return args[0].to(self.dtype(node.type))
        if node.op in ("arith.cmpf", "arith.cmpi"):
            return _compare(node.attr, *args)
        result = function(*args)
        return result if node.type == "i1" else result.to(self.dtype(node.type))


Philox = Callable[[Torch, Torch, int], Torch]


def philox(seed: Torch, element: Torch, stream: int) -> Torch:
    """Words of Philox4x32-10 as i32, by the definition of nova.philox."""
    mask = 0xFFFFFFFF
    seed, element = torch.broadcast_tensors(seed, element)
    counter = [element // 4, torch.zeros_like(element), torch.full_like(element, stream), torch.zeros_like(element)]
    counter = [c & mask for c in counter]
    key = [seed & mask, (seed >> 32) & mask]

    def multiply(a: Torch, b: int) -> tuple[Torch, Torch]:
        low16, high16 = a & 0xFFFF, a >> 16
        first, second = low16 * b, high16 * b  # below 2**48
        low = (first + ((second & 0xFFFF) << 16)) & mask
        carry = (first + ((second & 0xFFFF) << 16)) >> 32
        return low, (second >> 16) + carry

    for _ in range(10):
        low0, high0 = multiply(counter[0], 0xD2511F53)
        low1, high1 = multiply(counter[2], 0xCD9E8D57)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    words = torch.stack(counter, -1).gather(-1, (element % 4).unsqueeze(-1)).squeeze(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _reduce(value: Torch, axes: list[int], combine: str, init: float) -> Torch:
    start = torch.full([1] * value.dim(), init, dtype=value.dtype) if value.dtype != torch.bool else None
    for axis in axes:
        if value.shape[axis] == 0:
            shape = [1 if a == axis else n for a, n in enumerate(value.shape)]
            value = torch.full(shape, init, dtype=value.dtype)
        elif combine in ("arith.addf", "arith.addi"):
            value = value.sum(axis, keepdim=True, dtype=value.dtype)
        elif combine in ("arith.mulf", "arith.muli"):
            value = value.prod(axis, keepdim=True, dtype=value.dtype)
        elif combine in ("arith.maximumf", "arith.maxsi"):
            value = value.amax(axis, keepdim=True)
        elif combine in ("arith.minimumf", "arith.minsi"):
            value = value.amin(axis, keepdim=True)
        elif combine in ("arith.maxui", "arith.minui"):
            unsigned = value.to(torch.int64) & 0xFF
            picked = (
                unsigned.amax(axis, keepdim=True) if combine == "arith.maxui" else unsigned.amin(axis, keepdim=True)
            )
            value = picked.to(torch.uint8).view(torch.int8)
        elif combine == "arith.ori" and value.dtype == torch.bool:
            value = value.any(axis, keepdim=True)
        elif combine == "arith.andi" and value.dtype == torch.bool:
            value = value.all(axis, keepdim=True)
        else:
            raise CompileError(f"cannot reduce with {combine}")
    if start is not None and combine in ("arith.addf", "arith.addi"):
        value = value + start
    return value


def _compare(predicate: str, a: Torch, b: Torch) -> Torch:
    if predicate == "uno":
        return a.isnan() | b.isnan()
    if predicate == "ord":
        return ~(a.isnan() | b.isnan())
    core = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
    if predicate in ("eq", "ne"):
        return core[predicate](a, b)
    kind, name = predicate[0], predicate[1:]
    if a.is_floating_point():
        result = core[name](a, b)
        unordered = a.isnan() | b.isnan()
        return result & ~unordered if kind == "o" else result | unordered
    if kind == "u" and a.dtype != torch.bool:
        bias = torch.iinfo(a.dtype).min
        a, b = a ^ bias, b ^ bias
    return core[name](a, b)


def _floor_divide(a: Torch, b: Torch) -> Torch:
    return torch.div(a, b, rounding_mode="floor")


def _unsigned(function: Callable[[Torch, Torch], Torch]) -> Callable[[Torch, Torch], Torch]:
    def apply(a: Torch, b: Torch) -> Torch:
        mask = (1 << torch.iinfo(a.dtype).bits) - 1 if a.dtype != torch.int64 else -1
        return function(a.to(torch.int64) & mask, b.to(torch.int64) & mask).to(a.dtype)

    return apply


def _not_nan(a: Torch) -> Torch:
    return a


def _zero_extended(a: Torch) -> Torch:
    return a if a.dtype == torch.bool else a.to(torch.int64) & ((1 << torch.iinfo(a.dtype).bits) - 1)


_CASTS = frozenset(
    {"arith.extf", "arith.truncf", "arith.sitofp", "arith.trunci", "arith.extsi", "arith.index_cast", "arith.fptosi"}
)
OPS: dict[str, Callable[..., Torch]] = {
    **dict.fromkeys(_CASTS, _not_nan),
    "arith.cmpf": _compare, "arith.cmpi": _compare,
    "arith.uitofp": _zero_extended, "arith.extui": _zero_extended,
    "arith.addf": torch.add, "arith.subf": torch.sub, "arith.mulf": torch.mul, "arith.divf": torch.div,
    "arith.remf": torch.fmod, "arith.negf": torch.neg, "arith.maximumf": torch.maximum, "arith.minimumf": torch.minimum,
    "arith.addi": torch.add, "arith.subi": torch.sub, "arith.muli": torch.mul, "arith.select": torch.where,
    "arith.andi": lambda a, b: a & b, "arith.ori": lambda a, b: a | b, "arith.xori": lambda a, b: a ^ b,
    "arith.maxsi": torch.maximum, "arith.minsi": torch.minimum,
    "arith.maxui": _unsigned(torch.maximum), "arith.minui": _unsigned(torch.minimum),
    "arith.divsi": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "arith.remsi": torch.fmod,
    "arith.floordivsi": _floor_divide, "arith.divui": _unsigned(_floor_divide),
    "arith.remui": _unsigned(torch.remainder), "arith.shli": lambda a, b: a << b, "arith.shrsi": lambda a, b: a >> b,
    "arith.shrui": _unsigned(lambda a, b: a >> b),
    "math.exp": torch.exp, "math.exp2": torch.exp2, "math.expm1": torch.expm1, "math.log": torch.log,
    "math.log2": torch.log2, "math.log10": torch.log10, "math.log1p": torch.log1p, "math.sqrt": torch.sqrt,
    "math.rsqrt": torch.rsqrt, "math.sin": torch.sin, "math.cos": torch.cos, "math.tan": torch.tan,
    "math.asin": torch.asin, "math.acos": torch.acos, "math.atan": torch.atan, "math.sinh": torch.sinh,
    "math.cosh": torch.cosh, "math.tanh": torch.tanh, "math.asinh": torch.asinh, "math.acosh": torch.acosh,
    "math.atanh": torch.atanh, "math.erf": torch.erf, "math.erfc": torch.erfc, "math.floor": torch.floor,
    "math.ceil": torch.ceil, "math.trunc": torch.trunc, "math.roundeven": torch.round, "math.absf": torch.abs,
    "math.absi": torch.abs, "math.powf": torch.pow, "math.ipowi": torch.pow, "math.atan2": torch.atan2,
    "math.copysign": torch.copysign,
}  # fmt: skip


# --- kernels and steps -----------------------------------------------------------------------------------------------


def run_kernel(kernel: Kernel, inputs: Sequence[Torch], wide: bool = False, elements: int = 0) -> list[Torch]:
    """The results of a kernel, flat or shaped as its destinations. `elements`: of the tensor of a multi-tensor
    kernel."""
    sizes = [elements if n < 0 else n for n in kernel.loops]
    memory: dict[Tensor, Torch] = {}
    evaluator = _Evaluator(kernel, memory, sizes, wide, philox)
    for tensor, value in zip(kernel.args, inputs, strict=True):
        shape = [elements if n < 0 else n for n in tensor.shape]
        if value.dtype == torch.uint8:
            value = value.view(torch.int8)
        memory[tensor] = value.reshape(shape).to(evaluator.dtype(tensor.dtype))
    evaluator.run()
    return [evaluator.read(tensor) for tensor in kernel.outs]


def run_step(
    module: ir.Module,
    inputs: Sequence[Torch],
    wide: bool = False,
    lower: Callable[[ir.Module], ir.Module] | None = None,
) -> list[Torch]:
    """Runs an outlined step. `lower` takes a module with one kernel to level 2; by default the passes of this
    package."""
    lower = lower or _lower
    bodies = {text.name: text for text in outline.kernels(module)}
    symbols = outline.bodies_of(module)
    declared = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if op.operation.name == "func.func" and "nova.kernel" in op.attributes
    }
    lowered: dict[str, ir.Module] = {}
    step = records.step_function(module)
    assert step is not None
    block = step.regions[0].blocks[0]
    values = dict(zip(block.arguments, inputs, strict=True))
    for view in block.operations:
        op = view.operation
        operands = [values[v] for v in op.operands]
        if op.name == "func.return":
            return operands
        if op.name != "func.call":
            values.update(zip(op.results, _reference(op, operands, wide), strict=True))
            continue
        symbol = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        body = symbols[symbol]
        text = bodies[body]
        if text.name not in lowered:
            lowered[text.name] = lower(ir.Module.parse(text.text))
        results = _call(lowered[text.name], text.kind, operands, declared[symbol], wide)
        for result, value in zip(op.results, results, strict=True):
            described = describe(result.type)
            if described.dtype == "u8":
                value = value.view(torch.uint8)
            values[result] = value.reshape(described.shape)
    raise CompileError("the step does not return")


def _lower(module: ir.Module) -> ir.Module:
    from nova.fusion import elementwise, epilogue, to_linalg

    return epilogue.run(elementwise.run(to_linalg.run(module)))


def _call(module: ir.Module, kind: str, operands: list[Torch], declaration: ir.OpView, wide: bool) -> list[Torch]:
    function = outline.kernel_functions(module)[0]
    if kind in ("loops", "contraction"):
        return run_kernel(readback.read(function), operands, wide)
    if kind == "multi_tensor":
        count = ir.IntegerAttr(declaration.attributes["nova.count"]).value
        return _multi_tensor(readback.read(function), operands, count, wide)
    block = function.regions[0].blocks[0]
    values = dict(zip(block.arguments, operands, strict=False))
    for view in block.operations:
        op = view.operation
        if op.name == "func.return":
            return [values[v] for v in op.operands]
        results = _reference(op, [values[v] for v in op.operands], wide)
        values.update(zip(op.results, results, strict=True))
    raise CompileError("the kernel does not return")


def _multi_tensor(kernel: Kernel, operands: list[Torch], count: int, wide: bool) -> list[Torch]:
    per_argument: list[list[Torch]] = []
    position = 0
    for tensor in kernel.args:
        width = count if tensor.list_ else 1
        per_argument.append(operands[position : position + width])
        position += width
    results: list[list[Torch]] = [[] for _ in kernel.outs]
    for number in range(count):
        inputs = [values[number] if len(values) > 1 or tensor.list_ else values[0]
                  for values, tensor in zip(per_argument, kernel.args, strict=True)]  # fmt: skip
        outputs = run_kernel(kernel, inputs, wide, inputs[0].numel())
        for collected, output in zip(results, outputs, strict=True):
            collected.append(output)
    flat: list[Torch] = []
    for tensor, values in zip(kernel.outs, results, strict=True):
        flat += [torch.stack([v.reshape(()) for v in values])] if tensor.list_ == "nova.element" else values
    return flat


def _reference(op: ir.Operation, operands: list[Torch], wide: bool) -> list[Torch]:
    from nova.dialect import reference

    reference.load()
    if op.name == "nova.copy":
        return operands
    return list(reference.apply(op, operands, wide))
