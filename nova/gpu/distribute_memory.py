"""Loads and stores of tiles: one address a thread, constants for its registers, predicates where a tile may hang over.

    %q  = getelementptr %p[%base + offsets * strides]; getelementptr %q[%thread_part]           once a thread
    %x0 = llvm.load %q -> vector<4xf32>;  %x1 = llvm.load (%q + 4096 bytes) -> vector<4xf32>    constants fold
    %x0 = inline_asm "@$5 ld.global.v4.b32 {..}, [$4+$6];" ..                                   if bounds are checked

All accesses of a tile are issued one after the other, without a branch between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.exchange import ACCESS_BYTES
from nova.gpu.registers import bits_of, element_bytes, memory_element
from nova.tile.layout import NestedLayout
from nova.tile.text import Operand, Value, number_text


@dataclass(frozen=True)
class Window:
    """Where a tile lies in memory: element c of it at pointer + base + sum(c[d] * strides[d]), c = offsets + index."""

    pointer: Value
    base: Operand
    offsets: tuple[Operand, ...]
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    vector: int
    wide: bool

    @staticmethod
    def of(it: Distributor, op: Op, first: int) -> Window:
        """From an op whose operands are (.., pointer, base, *offsets), the pointer being operand `first`."""
        pointer, base, *offsets = op.operands[first:]
        return Window(
            it.scalar_of(pointer), it.number_of(base), tuple(it.number_of(o) for o in offsets), op["strides"],
            op["extents"], op["vector"], op["wide"],
        )  # fmt: skip


def runs(layout: NestedLayout, dim: int, width: int) -> np.ndarray:
    """int[accesses, width]: the registers that each access moves, `width` neighbours along `dim`."""
    registers = np.arange(layout.registers).reshape(layout.register_shape)
    axis = 2 * layout.rank + dim
    return np.moveaxis(registers, axis, -1).reshape(-1, width) if width > 1 else np.arange(layout.registers)[:, None]


def run_dim(layout: NestedLayout, strides: Sequence[int], width: int) -> int:
    """The dimension along which accesses of `width` elements run: the last one that allows it."""
    if width == 1:
        return layout.rank - 1
    return next(d for d in reversed(range(layout.rank)) if strides[d] == 1 and layout.element[d] % width == 0)


def register_offsets(layout: NestedLayout, strides: Sequence[int]) -> np.ndarray:
    """Elements between the address of register 0 and of each register."""
    total = np.zeros(layout.registers, np.int64)
    for dim, stride in enumerate(strides):
        total += layout.register_part(dim) * stride
    return total


def thread_pointer(it: Distributor, window: Window, layout: NestedLayout, element: str) -> Value:
    """The address of the thread's register 0. Inside a loop what the loop may change is added last."""
    number = "i64" if window.wide else "i32"
    terms = [
        (of, stride, count, step * window.strides[dim])
        for dim in range(layout.rank)
        for of, stride, count, step in layout.thread_part(dim)
    ]
    own = it.thread_sum(terms, number)
    moving: Operand = 0
    for offset, stride in zip(window.offsets, window.strides, strict=True):
        wide = it.cast(offset, number)
        product = wide * stride if isinstance(wide, int) else wide if stride == 1 else it.nsw("muli", wide, stride)
        moving = _sum(it, moving, product)
    parts = [own, window.base, moving] if it.loops else [window.base, moving, own]
    pointer = window.pointer
    for part in parts:
        pointer = it.offset(pointer, part, element)
    return pointer


def _sum(it: Distributor, a: Operand, b: Operand) -> Operand:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    for x, y in ((a, b), (b, a)):
        if isinstance(x, int) and x == 0:
            return y
    return it.nsw("addi", a, b)


def bounds(it: Distributor, window: Window, layout: NestedLayout, firsts: Sequence[int]) -> list[Value | None]:
    """For each access, by its first register, whether it is inside the extents; None where nothing is checked."""
    tests: list[list[Value]] = [[] for _ in firsts]
    for dim, extent in enumerate(window.extents):
        if extent < 0:
            continue
        first, own = window.offsets[dim], it.coordinate(layout, dim)
        here = it.add(first, it.cast(own, first.element) if isinstance(first, Value) else own)
        steps = layout.register_part(dim)
        made: dict[int, Value] = {}
        for test, register in zip(tests, firsts, strict=True):
            step = int(steps[register])
            if step not in made:
                made[step] = it.compare("slt", it.scalar(here), extent - step)
            test.append(made[step])
    joined: dict[tuple[str, ...], Value] = {}
    return [_all(it, joined, test) for test in tests]


def _all(it: Distributor, joined: dict[tuple[str, ...], Value], tests: Sequence[Value]) -> Value | None:
    """The conjunction, made once for equal tests."""
    if not tests:
        return None
    total = tests[0]
    for number, test in enumerate(tests[1:], 2):
        key = tuple(t.name for t in tests[:number])
        if key not in joined:
            joined[key] = it.result(f"arith.andi {total.name}, {test.name} : i1", "i1")
        total = joined[key]
    return total


def both(it: Distributor, a: Value | None, b: Value | None) -> Value | None:
    """a and b, None standing for true."""
    if a is None or b is None:
        return b if a is None else a
    return it.result(f"arith.andi {a.name}, {b.name} : i1", "i1")


@dataclass(frozen=True)
class Place:
    """Where one access goes: a pointer, constant bytes after it, and a condition."""

    pointer: Value
    constant: int
    predicate: Value | None


def load_places(
    it: Distributor,
    places: Sequence[Place],
    registers: np.ndarray,
    element: str,
    fill: Any,
    layout: NestedLayout | None,
) -> Value:
    """The registers that accesses bring, each `registers[i]` of them; `fill` where a predicate fails."""
    width = registers.shape[1]
    kind = memory_element(element)
    if any(place.predicate is not None for place in places):
        literal = number_text(fill, kind)
        always = it.constant(True, "i1")
        words = [
            word
            for place in places
            for word in it.load_where(
                place.predicate or always, place.pointer, place.constant, kind, width, bits_of(kind, literal)
            )
        ]
        loaded = it.from_words(words, kind, width)
    else:
        pieces = [it.load(it.offset(p.pointer, p.constant), kind, width if width > 1 else None) for p in places]
        loaded = it.concat(pieces) if width > 1 else it.from_elements(pieces)
    loaded = it.take(loaded, np.argsort(registers.reshape(-1)), layout)
    return it.as_boolean(loaded) if element == "i1" else loaded


def store_places(it: Distributor, places: Sequence[Place], registers: np.ndarray, tile: Value) -> None:
    """Writes `registers[i]` of a tile at place i."""
    width = registers.shape[1]
    if tile.element == "i1":
        tile = it.convert("arith.extui", tile, "i8")
    ordered = it.take(tile, registers.reshape(-1))
    if any(place.predicate is not None for place in places):
        always = it.constant(True, "i1")
        for place, words in zip(places, it.words(ordered, width), strict=True):
            it.store_where(place.predicate or always, words, place.pointer, place.constant, tile.element, width)
        return
    for number, place in enumerate(places):
        piece = it.take(ordered, range(number * width, number * width + width))
        it.store(piece if width > 1 else it.extract(piece, 0), it.offset(place.pointer, place.constant))


def window_places(
    it: Distributor, window: Window, layout: NestedLayout, element: str, own: Value | None
) -> tuple[list[Place], np.ndarray]:
    """The accesses of a window: (places, registers of each). `own`: a condition on top of the extents."""
    width = min(window.vector, ACCESS_BYTES // element_bytes(element))
    registers = runs(layout, run_dim(layout, window.strides, width), width)
    pointer = thread_pointer(it, window, layout, element)
    constants = register_offsets(layout, window.strides)[registers[:, 0]] * element_bytes(element)
    inside = bounds(it, window, layout, registers[:, 0].tolist())
    joined: dict[str, Value | None] = {}
    places = []
    for constant, test in zip(constants, inside, strict=True):
        key = "" if test is None else test.name
        if key not in joined:
            joined[key] = both(it, test, own)
        places.append(_place(it, pointer, int(constant), joined[key]))
    return places, registers


def _place(it: Distributor, pointer: Value, constant: int, predicate: Value | None) -> Place:
    """Constants that no instruction holds move into the pointer."""
    if abs(constant) < 1 << 23:
        return Place(pointer, constant, predicate)
    return Place(it.offset(pointer, constant), 0, predicate)


@lowers("nova_tile.load")
def load(it: Distributor, op: Op) -> None:
    layout = op["layout"]
    element = str(op.results[0].type.element_type)
    places, registers = window_places(it, Window.of(it, op, 0), layout, element, None)
    it.set(op.results[0], load_places(it, places, registers, element, op["fill"], layout))


@lowers("nova_tile.store")
def store(it: Distributor, op: Op) -> None:
    layout = op["layout"]
    tile = it.tile(op.operands[0], layout)
    places, registers = window_places(it, Window.of(it, op, 1), layout, tile.element, it.first_copy(layout))
    store_places(it, places, registers, tile)


def _scattered(it: Distributor, op: Op, first: int, element: str, own: Value | None) -> tuple[list[Place], np.ndarray]:
    """The accesses of operands (pointer, index [, mask]) from `first` on: one by one, at addresses from registers."""
    layout, vector = op["layout"], op["vector"]
    width = min(vector, ACCESS_BYTES // element_bytes(element))
    registers = runs(layout, layout.rank - 1, width)
    pointer, index = it.scalar_of(op.operands[first]), it.tile(op.operands[first + 1], layout)
    mask = it.tile(op.operands[first + 2], layout) if len(op.operands) > first + 2 else None
    leaders = runs(layout, layout.rank - 1, vector)[:, 0].repeat(vector // width)
    found: dict[int, tuple[Value, Value | None]] = {}
    places = []
    for leader, register in zip(map(int, leaders), map(int, registers[:, 0]), strict=True):
        if leader not in found:
            test = it.extract(mask, leader) if mask is not None else None
            found[leader] = it.offset(pointer, it.extract(index, leader), element), both(it, test, own)
        start, test = found[leader]
        places.append(Place(start, (register - leader) * element_bytes(element), test))
    return places, registers


@lowers("nova_tile.gather")
def gather(it: Distributor, op: Op) -> None:
    element = str(op.results[0].type.element_type)
    places, registers = _scattered(it, op, 0, element, None)
    it.set(op.results[0], load_places(it, places, registers, element, op["fill"], op["layout"]))


@lowers("nova_tile.scatter")
def scatter(it: Distributor, op: Op) -> None:
    tile = it.tile(op.operands[0], op["layout"])
    places, registers = _scattered(it, op, 1, tile.element, it.first_copy(op["layout"]))
    store_places(it, places, registers, tile)
