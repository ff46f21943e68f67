"""Kernels of kind "scan": inclusive running sums and products along one dim.

    func.func private @k(%x, %y {nova.out}) { %r = nova.cumsum(%x) {dim = 1}; return %r }

The tensor is seen as [outer, n, inner]. A task is one outer index and a block of `inner` in lanes (a scalar when inner
is 1); it walks n in order, with the running value in a register: f64 for f32, f32 for bf16 and f16, as PyTorch does.
"""

from __future__ import annotations

import math

from nova.cpu import build, parallel
from nova.cpu.loops_values import loop_i64
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.lowering.whole_op import WholeOp
from nova.mlir import ir
from nova.schedule.target import CpuTarget

SECONDS_PER_ELEMENT = 2e-9


def lower(func_op: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    """The kernel's module; it needs no workspace."""
    op = WholeOp.read(func_op)
    shape, axis = op.shape(0), op.integer("dim")
    n, outer, inner = shape[axis], math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    lanes = target.lanes("f32") if inner >= target.lanes("f32") else 0
    blocks = inner // lanes if lanes else 0
    rest = inner - blocks * max(lanes, 1)  # columns left over, one a task
    per_outer = blocks + rest
    combine = ln.addf if op.name == "nova.cumsum" else ln.mulf
    element = op.element(0)
    if not ln.is_float(element):
        combine = ln.addi if op.name == "nova.cumsum" else ln.muli
    start = 0 if op.name == "nova.cumsum" else 1

    def emit(region: parallel.Region) -> None:
        x, y = region.pointers
        with region.tasks() as task:
            index = build.to_i64(task)
            row, column = ln.divui(index, ln.i64(per_outer)), ln.remui(index, ln.i64(per_outer))
            base = ln.muli(row, ln.i64(n * inner))
            if not lanes:
                _walk(x, y, ln.addi(base, column), n, inner, element, 0, combine, start)
                return
            in_lanes = ln.cmpi("slt", column, ln.i64(blocks))
            wide = ln.addi(base, ln.muli(column, ln.i64(lanes)))
            single = ln.addi(base, ln.addi(ln.subi(column, ln.i64(blocks)), ln.i64(blocks * lanes)))
            if not rest:
                _walk(x, y, wide, n, inner, element, lanes, combine, start)
                return
            with build.if_then(in_lanes):
                _walk(x, y, wide, n, inner, element, lanes, combine, start)
            with build.if_then(ln.cmpi("sge", column, ln.i64(blocks))):
                _walk(x, y, single, n, inner, element, 0, combine, start)

    tasks = outer * per_outer if n else 0
    threads = target.cores if outer * n * inner * SECONDS_PER_ELEMENT > 8 * target.fork_seconds else 1
    phase = parallel.Phase(tasks, max(1, min(threads, tasks)), emit)
    return parallel.emit_kernel(op.function, op.types, [phase], op.aliased), 0


def _walk(
    x: Value, y: Value, first: Value, n: int, stride: int, element: ir.Type, lanes: int, combine, start: int
) -> None:
    """y[first + i * stride] = running value, for i < n."""
    running = running_type(element)

    def step(i: Value, carried: list[Value]) -> list[Value]:
        offset = ln.addi(first, ln.muli(i, ln.i64(stride)))
        value = widen(ln.load(ln.address(x, offset, element), element, lanes), running)
        total = combine(carried[0], value)
        ln.store(narrow(total, element), ln.address(y, offset, element))
        return [total]

    loop_i64(0, n, 1, [ln.constant(ln.vector_type(running, lanes), start)], step)


def running_type(element: ir.Type) -> ir.Type:
    """The type a long sum is kept in."""
    if ln.is_narrow_float(element):
        return ln.f32()
    return ln.f64() if element == ln.f32() else element


def widen(value: Value, element: ir.Type) -> Value:
    own = ln.element_of(value.type)
    if own == element:
        return value
    return ln.extend(value) if ln.is_narrow_float(own) else ln.cast("extf", value, element)


def narrow(value: Value, element: ir.Type) -> Value:
    own = ln.element_of(value.type)
    if own == element:
        return value
    return ln.narrow(value, element) if ln.is_narrow_float(element) else ln.cast("truncf", value, element)
