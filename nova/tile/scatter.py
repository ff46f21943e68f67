"""Kernels of kind "scatter": writes to places that data decides, with the same bits on every run.

A scatter is a list of `Updates`: number u has a place in the result (a key) and a row of values. After the base is
copied, or zeros are written,

    many       keys are sorted, stably, so that the updates of one place are neighbours, in their order; then one warp
               (or less, for short rows) a place combines its run. Runs of LONG and more are combined by whole blocks.
    few        threads own the columns of all places and walk the updates in order
    in lines   (scatter along a dim) threads own lines, and walk along the dim in order
    windows    (max_pool2d_backward) places look for the updates that are theirs

No atomics. A bad index goes to the error record and is skipped: nothing is written out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from nova.errors import CompileError
from nova.fusion.layout import broadcast_shape, broadcast_strides, row_major
from nova.mlir import ir
from nova.schedule.target import GpuTarget
from nova.tile import pooling
from nova.tile.builder import Program
from nova.tile.layout import blocked
from nova.tile.scatter_runs import combine_few, combine_lines, combine_runs
from nova.tile.text import Value
from nova.tile.updates import Updates
from nova.tile.whole_op import Op, decode, dot, power_of_two, vector_of
from nova.tile.widths import check_numbers, is_wide

THREADS = 256
FEW = 8  # updates that are walked rather than sorted
SHORT, MANY = 16, 4096  # lines of at most SHORT updates, or at least MANY lines: walked rather than sorted
VECTORS = 4  # of a thread in a copy
TAPS = 25  # of a pooling window whose elements look for their windows, rather than windows being sorted


def generate(func_op: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launches of a scatter, and its workspace in bytes."""
    op = Op(func_op)
    if op.name not in KINDS:
        raise CompileError(f"kernel @{op.function}: {op.name} is no scatter")
    KINDS[op.name](op)
    return op.launches, op.bytes


# --- the base ---------------------------------------------------------------------------------------------------------


def _fill(op: Op, base: int | None) -> None:
    """The result begins as operand `base` (nothing to do if they are one buffer), or as zeros."""
    size, element = math.prod(op.result_shape()), op.element(0)
    vector = vector_of(element, size)
    layout = blocked([THREADS * vector * VECTORS], [THREADS // 32], [32], vector)
    p = op.launch("zeros" if base is None else "copy", -(-size // layout.shape[0]), THREADS)
    place = p.mul(p.cast(p.program_id(0), "i64"), layout.shape[0])
    rest = size % layout.shape[0]
    last = size // layout.shape[0]

    def move(extents: list[int]) -> None:
        window: dict[str, Any] = {"strides": [1], "extents": extents, "vector": vector}
        if base is None:
            p.store(p.splat(0, layout.shape, element), op.result(p), place, [0], layout=layout, **window)
        else:
            p.store(
                p.load(op.operand(p, base), place, [0], element, layout, **window), op.result(p), place, [0], **window
            )

    def both() -> None:
        if last:
            with p.if_(p.compare("slt", p.program_id(0), last)):
                move([-1])
        if rest:
            with p.if_(p.compare("eq", p.program_id(0), last)):
                move([rest])

    if base is None:
        both()
        return
    with p.if_(p.compare("ne", p.address(op.operand(p, base)), p.address(op.result(p)))):
        both()


# --- the kinds --------------------------------------------------------------------------------------------------------


def _index(op: Op, p: Program, operand: int, at: Value, inside: Value | None) -> Value:
    """An element of an index tensor as i64."""
    return p.convert(p.gather(op.operand(p, operand), at, op.element(operand), inside), "i64")


def _checked(op: Op, p: Program, index: Value, place: Value, size: int, inside: Value, report: bool = True) -> Value:
    """Whether 0 <= place < size; where it is not, `index` is reported."""
    good = p.cmp("ult", place, size)
    if report and op.whole.raises:
        p.check(p.binary("arith.andi", inside, p.binary("arith.xori", good, True)), index, op.record(p))
    return p.binary("arith.andi", good, inside)


def _take_backward(op: Op) -> None:
    rows, padding = op.whole.integer("rows"), op.whole.integer("padding_idx")
    columns = math.prod(op.result_shape()[1:])

    def key(p: Program, u: Value, inside: Value) -> tuple[Value, Value]:
        index = _index(op, p, 1, u, inside)
        good = _checked(op, p, index, index, rows, inside)
        if padding >= 0:
            good = p.binary("arith.andi", good, p.cmp("ne", index, padding))
        return p.convert(index, "i32"), good

    count = math.prod(op.shape(1))
    _fill(op, None)
    _run(op, Updates(count, [count], [columns], 0, [rows], [columns], [columns], [1], [1], "add", key, fresh=True))


def _scatter(op: Op) -> None:
    shape, index_shape, axis = op.shape(0), op.shape(1), op.whole.integer("dim")
    rank = len(shape)
    count, along = math.prod(index_shape), index_shape[axis] if rank else 1
    base_strides = row_major(shape)

    def key(p: Program, u: Value, inside: Value) -> tuple[Value, Value]:
        index = _index(op, p, 1, u, inside)
        good = _checked(op, p, index, index, shape[axis] if rank else 1, inside)
        coordinates = decode(p, u, index_shape)
        if not rank:
            return p.convert(index, "i32"), good
        coordinates[axis] = p.convert(index, "i32")
        place = dot(p, coordinates, base_strides)
        assert isinstance(place, Value)
        return place, good

    _fill(op, 0)
    size = math.prod(shape)
    updates = Updates(count, [count], [1], 2, [size], [1], [], [], [], op.whole.text("reduce"), key)
    lines = count // along if along else 0
    if count and (along <= SHORT or lines >= MANY):
        others = [d for d in range(rank) if d != axis]
        strides = row_major(index_shape)
        _check_places(op, updates)
        combine_lines(
            op, updates, [index_shape[d] for d in others], [strides[d] for d in others], along,
            strides[axis] if rank else 1,
        )  # fmt: skip
        return
    _run(op, updates)


def _index_put(op: Op) -> None:
    shape, dims = op.shape(0), op.whole.integers("dims")
    index_shapes = [op.shape(2 + k) for k in range(len(dims))]
    picked = broadcast_shape(index_shapes)
    rest = [d for d in range(len(shape)) if d not in dims]
    front = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    full = [shape[d] for d in rest[:front]] + picked + [shape[d] for d in rest[front:]]
    value_strides = broadcast_strides(op.shape(1), full)
    picked_strides = value_strides[front : front + len(picked)]
    rest_strides = value_strides[:front] + value_strides[front + len(picked) :]
    base_strides = row_major(shape)

    def key(p: Program, u: Value, inside: Value) -> tuple[Value, Value]:
        coordinates = decode(p, u, picked)
        place: Value | None = None
        good = inside
        for k, d in enumerate(dims):
            at = dot(p, coordinates, broadcast_strides(index_shapes[k], picked), p.binary("arith.muli", u, 0))
            assert isinstance(at, Value)
            index = _index(op, p, 2 + k, at, inside)
            wrapped = index
            if op.whole.flag("wrap"):
                wrapped = p.select(p.cmp("slt", index, 0), p.binary("arith.addi", index, shape[d]), index)
            good = p.binary("arith.andi", good, _checked(op, p, index, wrapped, shape[d], inside))
            step = p.convert(wrapped, "i32")
            place = step if place is None else p.binary("arith.addi", p.binary("arith.muli", place, shape[d]), step)
        assert place is not None
        return place, good

    _fill(op, 0)
    updates = Updates(
        math.prod(picked), picked, picked_strides, 1, [shape[d] for d in dims], [base_strides[d] for d in dims],
        [shape[d] for d in rest], [base_strides[d] for d in rest], rest_strides,
        "add" if op.whole.flag("accumulate") else "none", key,
    )  # fmt: skip
    _run(op, updates)


def _as_strided_scatter(op: Op) -> None:
    """A strided window is overwritten; each of its elements has a place of its own."""
    sizes, strides = op.whole.integers("size"), op.whole.integers("stride")
    offset, count = op.whole.integer("offset"), math.prod(op.shape(1))

    def key(p: Program, u: Value, inside: Value) -> tuple[Value, Value]:
        place = dot(p, decode(p, u, sizes), strides, p.binary("arith.addi", p.binary("arith.muli", u, 0), offset))
        assert isinstance(place, Value)
        return place, inside

    _fill(op, 0)
    size = math.prod(op.shape(0))
    if count:
        updates = Updates(count, [count], [1], 1, [size], [1], [], [], [], "none", key)
        _check_places(op, updates)
        combine_lines(op, updates, [count], [1], 1, 1)


def _max_pool2d_backward(op: Op) -> None:
    if math.prod(op.whole.integers("kernel")) <= TAPS:
        pooling.backward(op)
        return
    shape = op.result_shape()
    size, windows, count = math.prod(shape[2:]), math.prod(op.shape(0)[2:]), math.prod(op.shape(0))

    def key(p: Program, u: Value, inside: Value) -> tuple[Value, Value]:
        index = _index(op, p, 1, u, inside)
        good = _checked(op, p, index, index, size, inside, report=False)
        plane = p.binary("arith.divui", u, max(windows, 1))
        return p.binary("arith.addi", p.binary("arith.muli", plane, size), p.convert(index, "i32")), good

    _fill(op, None)
    total = math.prod(shape)
    _run(op, Updates(count, [count], [1], 0, [total], [1], [], [], [], "add", key, fresh=True))


KINDS: dict[str, Callable[[Op], None]] = {
    "take_backward": _take_backward,
    "scatter": _scatter,
    "index_put": _index_put,
    "as_strided_scatter": _as_strided_scatter,
    "max_pool2d_backward": _max_pool2d_backward,
}


def _run(op: Op, updates: Updates) -> None:
    """The updates of places that several of them may share."""
    if not updates.count or not updates.columns:
        return
    _check_places(op, updates)
    if updates.count <= FEW and power_of_two(updates.columns) >= 32:
        combine_few(op, updates)
    else:
        combine_runs(op, updates)


def _check_places(op: Op, updates: Updates) -> None:
    check_numbers(f"kernel @{op.function}, updates", updates.count)
    if is_wide(updates.places + 1):
        raise CompileError(f"kernel @{op.function}: {updates.places} places are more than keys of 32 bits can name")
