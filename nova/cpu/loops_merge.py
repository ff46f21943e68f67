"""Reductions across rows: each task starts a partial of its own; a second phase joins them in task order.

    tasks 0..127:   partial[t] = identity; partial[t] += rows of task t       loops_emit
    merge:          out[j] = init + partial[0][j] + partial[1][j] + ...       in f64 for sums of f32

The order depends on shapes only, so the result is the same for every number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

from nova.cpu import body, build, parallel
from nova.cpu.loops_emit import NestEmitter, Storage
from nova.cpu.loops_ir import Access, Kernel, Result
from nova.cpu.loops_plan import Cross, Nest
from nova.cpu.loops_values import Cursor, Key, identity, is_identity, loop_i64
from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.schedule.target import CpuTarget

MERGE_TILE = 1024  # elements of the result that one task of the merge makes
Chunk = Callable[[Value, int], None]


def cross_keys(nest: Nest) -> set[Key]:
    return {cross.key for cross in nest.cross}


def slot_pointer(region: parallel.Region, slot: parallel.Slot) -> Value:
    """Pointer to a workspace slot, this thread's copy if it has one."""
    offset: Value = ln.i64(slot.offset)
    if slot.stride:
        share = ln.muli(build.to_i64(region.thread), ln.i64(slot.stride))
        offset = ln.addi(share, offset)
    return ln.address(region.workspace, offset, ln.int_type(8))


def start_partial(emitter: NestEmitter, cross: Cross, pointer: Value) -> None:
    """Writes the identity to a partial; with a combination of no known identity, what the result held before."""
    output = cross.output
    sink = Cursor(pointer, 1, output.element)
    if output.combiner is not None:
        number = identity(output.combiner, output.element)
        _lane_loop(0, cross.size, cross.size, emitter.full_lanes, lambda i, w: sink.write(ln.splat(number, w), i, w))
        return
    _lane_loop(
        0, cross.size, cross.size, emitter.full_lanes,
        lambda i, w: sink.write(_start(emitter, cross, i, w), i, w),
    )  # fmt: skip


def _start(emitter: NestEmitter, cross: Cross, i: Value, lanes: int) -> Value:
    """What element i of a result across rows holds before the kernel."""
    output = cross.output
    access = output.init.access
    if access is None:
        return ln.splat(emitter.init_value(output), lanes)
    place = emitter.place_of(access)
    if place.index.terms != _own(cross).linear().terms:
        raise CompileError("a reduction across rows must start from a dense tensor")
    pointer = ln.address(place.pointer, ln.i64(place.index.constant), place.element)
    return Cursor(pointer, 1, place.element).read(i, lanes)


def _own(cross: Cross) -> Access:
    output = cross.output
    return Access(Result(*cross.key), output.shape, output.element, output.access_indices)


def _lane_loop(begin: Value | int, end: Value | int, size: int, lanes: int, chunk: Chunk) -> None:
    """`chunk(i, lanes)` over begin .. end, which is a part of 0 .. size that begins at a multiple of `lanes`."""

    def with_lanes(width: int) -> Callable[[Value, list[Value]], list[Value]]:
        def emit(i: Value, carried: list[Value]) -> list[Value]:
            chunk(i, width)
            return carried

        return emit

    vectors = end // lanes * lanes if isinstance(end, int) else ln.andi(end, ln.i64(-lanes))
    if size >= lanes:
        loop_i64(begin, vectors, lanes, [], with_lanes(lanes))
    if size % lanes:
        if not isinstance(vectors, int):
            vectors = ln.maxsi(vectors, begin)  # an empty part at the end of a ragged size
        loop_i64(vectors, end, 1, [], with_lanes(0))


def merge_phase(
    kernel: Kernel,
    nest: Nest,
    partials: dict[Key, parallel.Slot],
    whole: dict[Key, parallel.Slot],
    target: CpuTarget,
) -> parallel.Phase:
    """Combines the partials of each element in task order, and the value the result started from."""
    longest = max(cross.size for cross in nest.cross)
    tiles = max(1, -(-longest // MERGE_TILE))
    work = longest * nest.tasks * len(nest.cross)
    threads = min(target.cores, tiles) if work > 1 << 18 else 1

    def emit(region: parallel.Region) -> None:
        storage = Storage(region.pointers)
        storage.whole = {k: slot_pointer(region, s) for k, s in whole.items() if k in cross_keys(nest)}
        emitter = NestEmitter(kernel, nest, storage, target.lanes("f32"), None)
        for cross in nest.cross:
            begin: Value | int = 0
            end: Value | int = cross.size
            if tiles > 1:
                limit = ln.i64(cross.size)
                begin, end = (
                    ln.minsi(ln.muli(build.to_i64(bound), ln.i64(MERGE_TILE)), limit)
                    for bound in (region.begin, region.end)
                )
            base = Cursor(slot_pointer(region, partials[cross.key]), 1, cross.output.element)
            _emit_merge(emitter, nest, cross, base, partials[cross.key].type.shape[1], begin, end)

    return parallel.Phase(tiles, threads, emit)


def _emit_merge(
    emitter: NestEmitter, nest: Nest, cross: Cross, base: Cursor, stride: int, begin: Value | int, end: Value | int
) -> None:
    output, combiner = cross.output, cross.output.combiner
    wide = combiner == "arith.addf" and output.element == ln.f32()
    sinks = [_sink(emitter, cross, access) for access in output.stores or [_own(cross)]]

    def widened(value: Value) -> Value:
        return ln.cast("extf", value, ln.f64()) if wide else value

    def chunk(i: Value, lanes: int) -> None:
        total = widened(base.read(i, lanes))
        if combiner is not None:

            def step(task: Value, values: list[Value]) -> list[Value]:
                at = ln.addi(i, ln.muli(task, ln.i64(stride)))
                return [body.combine(combiner, values[0], widened(base.read(at, lanes)))]

            (total,) = loop_i64(1, nest.tasks, 1, [total], step)
            if not is_identity(combiner, output.init, output.element):
                total = body.combine(combiner, widened(_start(emitter, cross, i, lanes)), total)
        if wide:
            total = ln.cast("truncf", total, ln.f32())
        for sink in sinks:
            sink.write(total, i, lanes)

    _lane_loop(begin, end, cross.size, emitter.full_lanes, chunk)


def _sink(emitter: NestEmitter, cross: Cross, access: Access) -> Cursor:
    """A destination whose elements lie in the order of the partial's."""
    place = emitter.place_of(access)
    if place.index.terms != _own(cross).linear().terms:
        raise CompileError("a reduction across rows must go to a dense tensor")
    return Cursor(ln.address(place.pointer, ln.i64(place.index.constant), place.element), 1, place.element)
