"""async_copy: a matrix from global to shared memory by cp.async, each thread the same places of every `pass` over it.

    thread t moves the vector at row t / v, column t % v of the first pass, v vectors being a row's; then further passes
    at constant distances: one global and one shared address a thread, and zeros (a source size of 0) out of bounds.

Elements that only move two bytes or less at a time are loaded and stored, since cp.async moves 4, 8 or 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nova.gpu.distribute import Buffer, Distributor, Op, lowers
from nova.gpu.distribute_memory import Window
from nova.gpu.registers import element_bytes, memory_element
from nova.gpu.shared_access import SharedWindow, Terms
from nova.mlir import ir
from nova.tile.layout import WARP
from nova.tile.text import Operand, Value


@dataclass(frozen=True)
class Passes:
    """Which vectors a thread moves. `steps`: (rows, columns) from its first one; `active`: threads that take part."""

    rows: Terms
    columns: Terms
    steps: tuple[tuple[int, int], ...]
    active: int


def passes_of(rows: int, columns: int, width: int, threads: int) -> Passes:
    """Threads in row-major order over the vectors; a power of two of them takes part, as many as come out even."""
    if columns % width:
        raise ValueError(f"vectors of {width} do not divide rows of {columns}")
    across = columns // width
    lanes = _power_below(across, min(threads, 1 << 30))  # threads along a row
    down = _power_below(rows, threads // lanes)
    steps = [(r, c) for r in range(0, rows, down) for c in range(0, columns, lanes * width)]
    return Passes(_digits(lanes, down, 1), _digits(1, lanes, width), tuple(steps), lanes * down)


def _power_below(number: int, limit: int) -> int:
    """The largest power of two that divides `number` and is at most `limit`."""
    power = 1
    while number % (2 * power) == 0 and 2 * power <= limit:
        power *= 2
    return power


def _digits(stride: int, count: int, step: int) -> Terms:
    """thread // stride % count * step, by lane and warp; stride and count are powers of two."""
    of_lane = max(min(count, WARP // stride), 1) if stride < WARP else 1
    of_warp = count // of_lane
    terms: list[tuple[str, int, int, int]] = []
    if of_lane > 1:
        terms.append(("lane", stride, of_lane, step))
    if of_warp > 1:
        terms.append(("warp", max(stride // WARP, 1), of_warp, step * of_lane))
    return tuple(terms)


@lowers("nova_tile.async_copy")
def async_copy(it: Distributor, op: Op) -> None:
    buffer = it.buffer_of(op.operands[1])
    size = element_bytes(buffer.element)
    window = _window(it, op)
    width = min(window.vector, 16 // size)
    passes = passes_of(buffer.rows, buffer.columns, width, it.threads)
    places = SharedWindow(it, buffer, it.number_of(op.operands[2]), (0, 0), passes.rows, passes.columns)
    guard = it.compare("slt", it.tid(), passes.active) if passes.active < it.threads else None
    if guard is not None:
        it.line(f"scf.if {guard.name} {{")
    with it.region():
        pointer = _pointer(it, op, window, passes, memory_element(buffer.element))
        copy = _copy if width * size >= 4 else _move
        for (row, column), inside in zip(passes.steps, _bounds(it, window, passes), strict=True):
            target, constant = places.at(row, column)
            source = it.offset(pointer, (row * window.strides[0] + column * window.strides[1]) * size)
            copy(it, source, it.offset(target, constant), buffer, width, inside)
    if guard is not None:
        it.line("}")


def _window(it: Distributor, op: Op) -> Window:
    pointer, _, _, base, *offsets = op.operands
    return Window(
        it.scalar_of(pointer), it.number_of(base), tuple(it.number_of(o) for o in offsets), op["strides"],
        op["extents"], op["vector"], op["wide"],
    )  # fmt: skip


def _pointer(it: Distributor, op: Op, window: Window, passes: Passes, element: str) -> Value:
    """The address of the thread's first vector. What changes in a loop is added last, so the rest stays outside."""
    number = "i64" if window.wide else "i32"
    strides = window.strides
    walked = enumerate((passes.rows, passes.columns))
    terms = [(of, s, count, step * strides[dim]) for dim, part in walked for of, s, count, step in part]
    parts: list[tuple[bool, Operand]] = [
        (False, it.thread_sum(terms, number)), (_moves(it, op.operands[3]), window.base),
    ]  # fmt: skip
    for offset, stride, operand in zip(window.offsets, strides, op.operands[4:], strict=True):
        wide = it.cast(offset, number)
        product = wide * stride if isinstance(wide, int) else wide if stride == 1 else it.nsw("muli", wide, stride)
        parts.append((_moves(it, operand), product))
    pointer = window.pointer
    for _, part in sorted(parts, key=lambda item: item[0]):
        pointer = it.offset(pointer, part, element)
    return pointer


def _moves(it: Distributor, operand: Any) -> bool:
    """Whether a level-4 value is defined in a loop."""
    owner = operand.owner
    block = owner if isinstance(owner, ir.Block) else owner.operation.block
    return bool(block != it.block)


def _bounds(it: Distributor, window: Window, passes: Passes) -> Iterator[Value | None]:
    """For each pass, whether its vector is inside the extents."""
    here = [
        it.add(it.thread_sum(part), offset) if extent >= 0 else 0
        for part, offset, extent in zip((passes.rows, passes.columns), window.offsets, window.extents, strict=True)
    ]
    made: dict[Any, Value | None] = {}
    for step in passes.steps:
        checked = tuple(s if extent >= 0 else -1 for s, extent in zip(step, window.extents, strict=True))
        if checked not in made:
            made[checked] = _inside(it, here, checked, window.extents, made)
        yield made[checked]


def _inside(
    it: Distributor, here: Sequence[Operand], step: Sequence[int], extents: Sequence[int], made: dict[Any, Value | None]
) -> Value | None:
    total = None
    for dim, extent in enumerate(extents):
        if extent < 0:
            continue
        key = ("along", dim, step[dim])  # (unlike the keys of whole steps)
        test = made.get(key)
        if test is None:
            test = made[key] = it.compare("slt", it.scalar(here[dim]), extent - step[dim])
        total = test if total is None else it.result(f"arith.andi {total.name}, {test.name} : i1", "i1")
    return total


def _copy(it: Distributor, source: Value, target: Value, buffer: Buffer, width: int, inside: Value | None) -> None:
    """One cp.async, of nothing (hence zeros) where the vector is not inside."""
    size = element_bytes(buffer.element) * width
    cache = "cg" if size == 16 else "ca"
    text = f"nvvm.cp.async.shared.global {target.name}, {source.name}, {size}, cache = {cache}"
    types = f"{target.element}, {source.element}"
    if inside is not None:
        full, none = it.constant(size, "i32"), it.constant(0, "i32")
        count = it.select(inside, full, none)
        text, types = f"{text}, {count.name}", f"{types}, i32"
    it.line(f"{text} : {types}")


def _move(it: Distributor, source: Value, target: Value, buffer: Buffer, width: int, inside: Value | None) -> None:
    """A load and a store, through a register."""
    kind = memory_element(buffer.element)
    if inside is None:
        it.store(it.load(source, kind), target)
        return
    words = it.load_where(inside, source, 0, kind, width, 0)
    it.store(it.extract(it.from_words(words, kind, width), 0), target)


@lowers("nova_tile.async_commit")
def async_commit(it: Distributor, op: Op) -> None:
    it.line("nvvm.cp.async.commit.group")


@lowers("nova_tile.async_wait")
def async_wait(it: Distributor, op: Op) -> None:
    it.line(f"nvvm.cp.async.wait.group {op['pending']}")
