"""Kernels of kind "scatter": writes to places that data decides, with the same bits for any number of threads.

    take_backward          sorted by destination: each row of the table is summed once, in order of the ids
    scatter, index_put     the base is copied, then every line (or column of values) is written by one task, in order
    as_strided_scatter     the base is copied, then a strided window of it is overwritten
    max_pool2d_backward    one plane a task

A bad index goes to the error record and is skipped: nothing is written out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nova.cpu import build, parallel
from nova.cpu.loops_values import Cursor, loop_i64
from nova.cpu.scan import narrow, widen
from nova.errors import CompileError
from nova.fusion.layout import broadcast_shape, broadcast_strides, row_major
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.lowering.whole_op import WholeOp
from nova.mlir import ir, scf
from nova.schedule.target import CpuTarget

COLUMNS = 64  # of one task
SMALL = 1 << 15  # elements below which a kernel does not fork


def lower(func_op: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    """The kernel's module and its workspace in bytes."""
    op = WholeOp.read(func_op)
    if op.name not in LOWERINGS:
        raise CompileError(f"kernel @{op.function}: {op.name} is no scatter")
    workspace = parallel.Workspace()
    phases = LOWERINGS[op.name](op, target, workspace)
    return parallel.emit_kernel(op.function, op.types, phases, op.aliased), workspace.bytes


def _threads(target: CpuTarget, tasks: int, elements: int) -> int:
    return max(1, min(target.cores, tasks)) if elements > SMALL else 1


def _range(region: parallel.Region, unit: int, end: int) -> tuple[Value, Value]:
    """This thread's tasks as one range of `unit` items each, up to `end`."""
    limit = ln.i64(end)
    bounds = (ln.muli(build.to_i64(b), ln.i64(unit)) for b in (region.begin, region.end))
    begin, stop = (ln.minsi(bound, limit) for bound in bounds)
    return begin, stop


def _index(pointer: Value, element: ir.Type, at: Value) -> Value:
    """An index tensor's element as i64."""
    value = ln.load(ln.address(pointer, at, element), element)
    return value if element == ln.int_type(64) else ln.cast("extsi", value, ln.int_type(64))


def _error(op: WholeOp, region: parallel.Region) -> Value | None:
    return parallel.load_argument(region.args, len(op.types) + 1) if op.raises else None


def _if_in_bounds(index: Value, size: int, error: Value | None, then: Callable[[], None]) -> None:
    """Runs `then` if 0 <= index < size, else reports the index."""
    branch = scf.IfOp(ln.cmpi("ult", index, ln.i64(size)), has_else=error is not None)
    with ir.InsertionPoint(branch.then_block):
        then()
        scf.YieldOp([])
    if error is not None:
        with ir.InsertionPoint(branch.else_block):
            ln.store(index, ln.address(error, ln.i64(1), ln.int_type(64)))
            ln.store(ln.i64(1), error)
            scf.YieldOp([])


def _lane_loop(begin: Value, end: Value, lanes: int, emit: Callable[[Value, int], None]) -> None:
    """`emit(i, lanes)` in vectors, then one by one."""

    def chunk(width: int):
        def body(i: Value, carried: list[Value]) -> list[Value]:
            emit(i, width)
            return carried

        return body

    vectors = ln.addi(begin, ln.andi(ln.subi(end, begin), ln.i64(-lanes)))
    loop_i64(begin, vectors, lanes, [], chunk(lanes))
    loop_i64(vectors, end, 1, [], chunk(0))


def _loop(begin: Value | int, end: Value | int, emit: Callable[[Value], None]) -> None:
    def body(i: Value, carried: list[Value]) -> list[Value]:
        emit(i)
        return carried

    loop_i64(begin, end, 1, [], body)


def _decode(flat: Value, extents: Sequence[int]) -> list[Value]:
    """Coordinates of a flat row-major position."""
    coordinates: list[Value] = []
    for extent in reversed(extents[1:]):
        coordinates.append(ln.remui(flat, ln.i64(extent)) if extent > 1 else ln.i64(0))
        flat = ln.divui(flat, ln.i64(extent)) if extent > 1 else flat
    return [flat, *reversed(coordinates)] if extents else []


def _dot(coordinates: Sequence[Value], strides: Sequence[int], start: int = 0) -> Value:
    total = ln.i64(start)
    for coordinate, stride in zip(coordinates, strides, strict=True):
        if stride:
            total = ln.addi(total, ln.muli(coordinate, ln.i64(stride)) if stride != 1 else coordinate)
    return total


# --- take_backward ---------------------------------------------------------------------------------------------------


def _take_backward(op: WholeOp, target: CpuTarget, workspace: parallel.Workspace) -> list[parallel.Phase]:
    """ends[v + 1] = end of row v's positions in `order`, which lists the positions of ids by row, in order."""
    rows, padding = op.integer("rows"), op.integer("padding_idx")
    count = math.prod(op.shape(1))
    columns = math.prod(op.result_shape()[1:])
    element, id_element = op.element(0), op.element(1)
    i32 = ln.int_type(32)
    ends, order = workspace.shared([rows + 1], i32), workspace.shared([max(count, 1)], i32)

    def pointers(region: parallel.Region) -> tuple[Value, Value]:
        return tuple(ln.address(region.workspace, ln.i64(s.offset), ln.int_type(8)) for s in (ends, order))  # type: ignore[return-value]

    def sort(region: parallel.Region) -> None:
        ends_at, order_at = pointers(region)
        ids, error = region.pointers[op.operands[1]], _error(op, region)
        zero, one = ln.constant(i32, 0), ln.constant(i32, 1)

        def cursor(row: Value) -> Value:
            return ln.address(ends_at, ln.addi(row, ln.i64(1)), i32)

        def each(visit: Callable[[Value, Value], None], report: Value | None) -> None:
            def position(i: Value) -> None:
                row = _index(ids, id_element, i)

                def counted() -> None:
                    if padding < 0:
                        visit(i, row)
                        return
                    with build.if_then(ln.cmpi("ne", row, ln.i64(padding))):
                        visit(i, row)

                _if_in_bounds(row, rows, report, counted)

            _loop(0, count, position)

        def add_one(i: Value, row: Value) -> None:
            ln.store(ln.addi(ln.load(cursor(row), i32), one), cursor(row))

        def place(i: Value, row: Value) -> None:
            at = ln.load(cursor(row), i32)
            ln.store(ln.cast("trunci", i, i32), ln.address(order_at, ln.cast("extsi", at, ln.int_type(64)), i32))
            ln.store(ln.addi(at, one), cursor(row))

        def begin(row: Value, carried: list[Value]) -> list[Value]:
            size = ln.load(cursor(row), i32)
            ln.store(carried[0], cursor(row))
            return [ln.addi(carried[0], size)]

        _loop(0, rows + 1, lambda row: ln.store(zero, ln.address(ends_at, row, i32)))
        each(add_one, error)
        loop_i64(0, rows, 1, [zero], begin)
        each(place, None)

    by_column = columns >= COLUMNS * target.cores
    lanes = target.lanes("f32")

    def gather(region: parallel.Region) -> None:
        ends_at, order_at = pointers(region)
        dy, out = region.pointers[op.operands[0]], region.pointers[op.results[0]]
        low, high = (ln.i64(0), ln.i64(columns))
        first, last = (ln.i64(0), ln.i64(rows))
        if by_column:
            low, high = _range(region, COLUMNS, columns)
        else:
            first, last = _range(region, 1, rows)

        def row(v: Value) -> None:
            start, stop = (
                ln.cast("extsi", ln.load(ln.address(ends_at, at, i32), i32), ln.int_type(64))
                for at in (v, ln.addi(v, ln.i64(1)))
            )

            def chunk(j: Value, width: int) -> None:
                running = ln.f32() if ln.is_narrow_float(element) else element

                def add(k: Value, carried: list[Value]) -> list[Value]:
                    source = ln.cast("extsi", ln.load(ln.address(order_at, k, i32), i32), ln.int_type(64))
                    at = ln.addi(ln.muli(source, ln.i64(columns)), j)
                    value = widen(ln.load(ln.address(dy, at, element), element, width), running)
                    return [(ln.addf if ln.is_float(running) else ln.addi)(carried[0], value)]

                zero = ln.constant(ln.vector_type(running, width), 0)
                (total,) = loop_i64(start, stop, 1, [zero], add)
                at = ln.addi(ln.muli(v, ln.i64(columns)), j)
                ln.store(narrow(total, element), ln.address(out, at, element))

            _lane_loop(low, high, 4 * lanes, chunk) if columns >= 4 * lanes else _lane_loop(low, high, lanes, chunk)

        _loop(first, last, row)

    tasks = -(-columns // COLUMNS) if by_column else rows
    work = (rows + count) * columns
    return [parallel.Phase(1, 1, sort), parallel.Phase(tasks, _threads(target, tasks, work), gather)]


# --- scatter and index_put -------------------------------------------------------------------------------------------


def _copy_base(op: WholeOp, target: CpuTarget, operand: int) -> parallel.Phase:
    """result = base, unless they are one buffer."""
    size, element = math.prod(op.shape(operand)), op.element(operand)
    block, lanes = 4096, target.lanes("f32")
    tasks = -(-size // block)

    def emit(region: parallel.Region) -> None:
        base, out = region.pointers[op.operands[operand]], region.pointers[op.results[0]]
        begin, end = _range(region, block, size)
        same = [ln.create("llvm.ptrtoint", ln.int_type(64), [p]) for p in (base, out)]
        source, sink = Cursor(base, 1, element), Cursor(out, 1, element)
        with build.if_then(ln.cmpi("ne", *same)):
            _lane_loop(begin, end, 4 * lanes, lambda i, width: sink.write(source.read(i, width), i, width))

    return parallel.Phase(tasks, _threads(target, tasks, size), emit)


_REDUCE: dict[str, tuple[Callable[..., Value], Callable[..., Value]]] = {
    "add": (ln.addf, ln.addi),
    "mul": (ln.mulf, ln.muli),
    "amax": (ln.maximum, ln.maxsi),
    "amin": (ln.minimum, ln.minsi),
}


def _update(pointer: Value, value: Value, element: ir.Type, reduce: str) -> None:
    """*pointer = reduce(*pointer, value)."""
    if reduce != "none":
        old = ln.load(pointer, element)
        if element == ln.int_type(1):
            value = ln.ori(old, value) if reduce in ("add", "amax") else ln.andi(old, value)
        elif ln.is_float(element):
            narrow_type = ln.is_narrow_float(element)
            wide = [ln.extend(x) if narrow_type else x for x in (old, value)]
            value = _REDUCE[reduce][0](*wide)
            value = ln.narrow(value, element) if narrow_type else value
        else:
            value = _REDUCE[reduce][1](old, value)
    ln.store(value, pointer)


def _scatter(op: WholeOp, target: CpuTarget, workspace: parallel.Workspace) -> list[parallel.Phase]:
    """Lines along `dim` are independent; the last dim is walked inside, a block of it a task."""
    shape, index_shape, axis = op.shape(0), op.shape(1), op.integer("dim")
    element, id_element, reduce = op.element(0), op.element(1), op.text("reduce")
    rank = len(shape)
    last = rank - 1 if rank and axis != rank - 1 else None
    outer = [d for d in range(rank) if d not in (axis, last)]
    blocks = -(-index_shape[last] // COLUMNS) if last is not None else 1
    lines = math.prod(index_shape[d] for d in outer)
    base_strides, index_strides = row_major(shape), row_major(index_shape)
    along = index_shape[axis] if rank else 1
    size = shape[axis] if rank else 1

    def emit(region: parallel.Region) -> None:
        ids, src = (region.pointers[op.operands[k]] for k in (1, 2))
        out, error = region.pointers[op.results[0]], _error(op, region)
        with region.tasks() as task:
            flat = build.to_i64(task)
            line, block = (
                (ln.divui(flat, ln.i64(blocks)), ln.remui(flat, ln.i64(blocks))) if blocks > 1 else (flat, ln.i64(0))
            )
            coordinates = _decode(line, [index_shape[d] for d in outer])
            out_base = _dot(coordinates, [base_strides[d] for d in outer])
            index_base = _dot(coordinates, [index_strides[d] for d in outer])

            def element_at(k: Value, j: Value | None) -> None:
                at, to = ln.addi(index_base, ln.muli(k, ln.i64(index_strides[axis] if rank else 0))), out_base
                if j is not None:
                    at, to = ln.addi(at, j), ln.addi(to, j)
                where = _index(ids, id_element, at)

                def write() -> None:
                    place = ln.addi(to, ln.muli(where, ln.i64(base_strides[axis] if rank else 1)))
                    value = ln.load(ln.address(src, at, element), element)
                    _update(ln.address(out, place, element), value, element, reduce)

                _if_in_bounds(where, size, error, write)

            def step(k: Value) -> None:
                if last is None:
                    element_at(k, None)
                    return
                low = ln.muli(block, ln.i64(COLUMNS))
                high = ln.minsi(ln.addi(low, ln.i64(COLUMNS)), ln.i64(index_shape[last]))
                _loop(low, high, lambda j: element_at(k, j))

            _loop(0, along, step)

    tasks = lines * blocks if math.prod(index_shape) else 0
    return [_copy_base(op, target, 0), parallel.Phase(tasks, _threads(target, tasks, math.prod(index_shape)), emit)]


def _index_put(op: WholeOp, target: CpuTarget, workspace: parallel.Workspace) -> list[parallel.Phase]:
    """A task owns a block of the dims that are not indexed, and walks the picked positions in order."""
    shape, dims, element = op.shape(0), op.integers("dims"), op.element(0)
    reduce = "add" if op.flag("accumulate") else "none"
    index_shapes = [op.shape(2 + k) for k in range(len(dims))]
    picked = broadcast_shape(index_shapes)
    rest = [d for d in range(len(shape)) if d not in dims]
    front = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    full = [shape[d] for d in rest[:front]] + picked + [shape[d] for d in rest[front:]]
    value_strides = broadcast_strides(op.shape(1), full)
    picked_strides = value_strides[front : front + len(picked)]
    rest_value_strides = value_strides[:front] + value_strides[front + len(picked) :]
    base_strides = row_major(shape)
    rest_count, picked_count = math.prod(shape[d] for d in rest), math.prod(picked)
    block = COLUMNS if rest_count >= COLUMNS else max(rest_count, 1)
    tasks = -(-rest_count // block)

    def emit(region: parallel.Region) -> None:
        values, out = region.pointers[op.operands[1]], region.pointers[op.results[0]]
        indices = [region.pointers[op.operands[2 + k]] for k in range(len(dims))]
        error = _error(op, region)
        begin, end = _range(region, block, rest_count)

        def position(p: Value) -> None:
            coordinates = _decode(p, picked)
            value_base = _dot(coordinates, picked_strides)

            def locate(k: int, offset: Value) -> None:
                if k == len(dims):
                    _loop(begin, end, lambda r: put(r, offset, value_base))
                    return
                at = _dot(coordinates, broadcast_strides(index_shapes[k], picked))
                index, size = _index(indices[k], op.element(2 + k), at), shape[dims[k]]
                wrapped = index
                if op.flag("wrap"):
                    wrapped = ln.select(ln.cmpi("slt", index, ln.i64(0)), ln.addi(index, ln.i64(size)), index)
                branch = scf.IfOp(ln.cmpi("ult", wrapped, ln.i64(size)), has_else=error is not None)
                with ir.InsertionPoint(branch.then_block):
                    locate(k + 1, ln.addi(offset, ln.muli(wrapped, ln.i64(base_strides[dims[k]]))))
                    scf.YieldOp([])
                if error is not None:
                    with ir.InsertionPoint(branch.else_block):
                        ln.store(index, ln.address(error, ln.i64(1), ln.int_type(64)))
                        ln.store(ln.i64(1), error)
                        scf.YieldOp([])

            locate(0, ln.i64(0))

        def put(r: Value, offset: Value, value_base: Value) -> None:
            coordinates = _decode(r, [shape[d] for d in rest])
            to = ln.addi(offset, _dot(coordinates, [base_strides[d] for d in rest]))
            at = ln.addi(value_base, _dot(coordinates, rest_value_strides))
            _update(ln.address(out, to, element), ln.load(ln.address(values, at, element), element), element, reduce)

        _loop(0, picked_count, position)

    work = rest_count * picked_count
    return [_copy_base(op, target, 0), parallel.Phase(tasks, _threads(target, tasks, work), emit)]


# --- strided windows, pooling ----------------------------------------------------------------------------------------


def _as_strided_scatter(op: WholeOp, target: CpuTarget, workspace: parallel.Workspace) -> list[parallel.Phase]:
    sizes, strides, offset = op.integers("size"), op.integers("stride"), op.integer("offset")
    element, count = op.element(0), math.prod(op.shape(1))
    inner = sizes[-1] if sizes else 1
    tasks = count // inner if count else 0

    def emit(region: parallel.Region) -> None:
        update, out = region.pointers[op.operands[1]], region.pointers[op.results[0]]
        with region.tasks() as task:
            line = build.to_i64(task)
            base = _dot(_decode(line, sizes[:-1]), strides[:-1], offset) if len(sizes) > 1 else ln.i64(offset)
            start = ln.muli(line, ln.i64(inner))

            def one(j: Value) -> None:
                value = ln.load(ln.address(update, ln.addi(start, j), element), element)
                to = ln.addi(base, ln.muli(j, ln.i64(strides[-1] if strides else 0)))
                ln.store(value, ln.address(out, to, element))

            _loop(0, inner, one)

    return [_copy_base(op, target, 0), parallel.Phase(tasks, _threads(target, tasks, count), emit)]


def _max_pool2d_backward(op: WholeOp, target: CpuTarget, workspace: parallel.Workspace) -> list[parallel.Phase]:
    shape, element, lanes = op.result_shape(), op.element(0), target.lanes("f32")
    planes, size, windows = math.prod(shape[:2]), math.prod(shape[2:]), math.prod(op.shape(0)[2:])

    def emit(region: parallel.Region) -> None:
        dy, ids = (region.pointers[op.operands[k]] for k in (0, 1))
        out = region.pointers[op.results[0]]
        with region.tasks() as task:
            plane = build.to_i64(task)
            base, start = ln.muli(plane, ln.i64(size)), ln.muli(plane, ln.i64(windows))
            sink = Cursor(ln.address(out, base, element), 1, element)

            def clear(i: Value, width: int) -> None:
                sink.write(ln.constant(ln.vector_type(element, width), 0), i, width)

            _lane_loop(ln.i64(0), ln.i64(size), lanes, clear)

            def window(w: Value) -> None:
                at = ln.addi(start, w)
                where = _index(ids, ln.int_type(64), at)

                def add() -> None:
                    value = ln.load(ln.address(dy, at, element), element)
                    _update(ln.address(out, ln.addi(base, where), element), value, element, "add")

                _if_in_bounds(where, size, None, add)

            _loop(0, windows, window)

    return [parallel.Phase(planes, _threads(target, planes, planes * (size + windows)), emit)]


LOWERINGS = {
    "nova.take_backward": _take_backward,
    "nova.scatter": _scatter,
    "nova.index_put": _index_put,
    "nova.as_strided_scatter": _as_strided_scatter,
    "nova.max_pool2d_backward": _max_pool2d_backward,
}
