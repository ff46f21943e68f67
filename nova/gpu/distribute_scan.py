"""Running combinations along one dimension of a tile, in order of the index.

    registers   a run of neighbouring elements is combined one after the other
    lanes       %y = nvvm.shfl.sync up %total, 1, 2, 4, ..: the lanes before; the last lane has the total of all
    groups      what the thread holds of later rounds is combined with the totals of the rounds before
    warps       totals meet in shared memory; each warp combines those of the warps before it

The order is fixed, so the bits are the same on every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.distribute_reduce import _read, _Slots, _write, combine
from nova.gpu.registers import element_bytes
from nova.tile.layout import WARP, NestedLayout
from nova.tile.text import BITS, Operand, Value


@lowers("nova_tile.scan")
def scan(it: Distributor, op: Op) -> None:
    layout, dim, kind = op["layout"], op["dim"], op["kind"]
    tile = it.tile(op.operands[0], layout)
    it.set(op.results[0], _Scan(it, layout, dim, kind).run(tile))


class _Scan:
    """Pieces are vectors of the registers that differ in other dimensions only: [round][element of a run]."""

    def __init__(self, it: Distributor, layout: NestedLayout, dim: int, kind: str):
        self.it, self.layout, self.dim, self.kind = it, layout, dim, kind
        self.rounds = layout.batch[dim] * layout.outer[dim]
        self.run_length = layout.element[dim]
        registers = np.arange(layout.registers).reshape(layout.register_shape)
        along = [level * layout.rank + dim for level in range(3)]
        kept = [axis for axis in range(3 * layout.rank) if axis not in along]
        order = registers.transpose(along + kept).reshape(self.rounds, self.run_length, -1)
        self.order: list[list[list[int]]] = order.tolist()
        self.kept = order.shape[2]

    def join(self, before: Value, after: Value) -> Value:
        return combine(self.it, self.kind, before, after)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        return self.it.select(condition, a, b)

    def run(self, tile: Value) -> Value:
        it = self.it
        pieces = [[it.take(tile, registers) for registers in row] for row in self.order]
        for row in pieces:
            for e in range(1, self.run_length):
                row[e] = self.join(row[e - 1], row[e])
        totals = [row[-1] for row in pieces]
        if self.layout.thread[self.dim] > 1:
            for number, row in enumerate(pieces):
                before, totals[number] = self.lanes(totals[number])
                pieces[number] = [self.after_lanes(before, piece) for piece in row]
        running = totals[0]
        for number in range(1, self.rounds):
            pieces[number] = [self.join(running, piece) for piece in pieces[number]]
            running = self.join(running, totals[number])
        if self.layout.subgroup[self.dim] > 1:
            pieces = self.warps(pieces, running)
        flat = it.concat([piece for row in pieces for piece in row])
        place = np.empty(self.layout.registers, np.int64)
        place[np.array(self.order).reshape(-1)] = np.arange(self.layout.registers)
        return it.take(flat, place.tolist(), self.layout)

    # --- lanes ---

    def digit(self) -> Value:
        """The lane's place along the dimension."""
        digit = self.it.digit("lane", self.layout.thread_strides[self.dim], self.layout.thread[self.dim])
        assert isinstance(digit, Value)
        return digit

    def is_after(self, lanes: int) -> Value:
        key = ("scan", self.layout.thread_strides[self.dim], self.layout.thread[self.dim], lanes)
        return self.it.once(key, lambda: self.it.compare("sge", self.digit(), lanes))

    def lanes(self, total: Value) -> tuple[Value, Value]:
        """(the combination of the lanes before, of all lanes)."""
        it, stride, count = self.it, self.layout.thread_strides[self.dim], self.layout.thread[self.dim]
        step = 1
        while step < count:
            other = self.shuffle(total, functools.partial(self._up, by=step * stride))
            total = self.where(self.is_after(step), self.join(other, total), total)
            step *= 2
        before = self.shuffle(total, functools.partial(self._up, by=stride))

        def last() -> Value:
            rest = it.mul(it.sub(count - 1, self.digit()), stride)
            found = it.add(it.lane(), rest)
            assert isinstance(found, Value)
            return found

        source = it.once(("scan last", stride, count), last)
        return before, self.shuffle(total, functools.partial(self._from, lane=source))

    def after_lanes(self, before: Value, piece: Value) -> Value:
        return self.where(self.is_after(1), self.join(before, piece), piece)

    def shuffle(self, value: Value, move: Callable[[Value], Value]) -> Value:
        """Every register through a shuffle of 32 bits."""
        it, element, bits = self.it, value.element, BITS[value.element]
        if bits == 32:
            return it.from_elements([move(e) for e in it.elements(value)])
        if bits > 32:
            halves = it.elements(it.bitcast(value, "i32"))
            return it.bitcast(it.from_elements([move(h) for h in halves]), element)
        integers = it.bitcast(value, f"i{bits}") if bits > 1 else value
        wide = it.elements(it.convert("arith.extui", integers, "i32"))
        narrow = it.convert("arith.trunci", it.from_elements([move(w) for w in wide]), f"i{bits}")
        return it.bitcast(narrow, element)

    def _up(self, scalar: Value, by: int) -> Value:
        return self._move("up", scalar, self.it.constant(by, "i32"), 0)

    def _from(self, scalar: Value, lane: Value) -> Value:
        return self._move("idx", scalar, lane, WARP - 1)

    def _move(self, mode: str, scalar: Value, by: Value, clamp: int) -> Value:
        it = self.it
        names = ", ".join(v.name for v in (it.constant(-1, "i32"), scalar, by, it.constant(clamp, "i32")))
        return it.result(f"nvvm.shfl.sync {mode} {names} : {scalar.element} -> {scalar.element}", scalar.element)

    # --- warps ---

    def warps(self, pieces: list[list[Value]], total: Value) -> list[list[Value]]:
        it, layout, dim = self.it, self.layout, self.dim
        slots = _Slots(it, layout, [dim], self.kept)
        size = element_bytes(total.element)
        with it.scratch(slots.total * size) as scratch:
            writer = it.first_copy(layout.project([dim]), of_lanes=True)
            _write(it, total, it.offset(scratch, slots.own, total.element), writer)
            it.barrier()
            start = it.offset(scratch, slots.group, total.element)
            step = slots.lanes * slots.registers * size
            parts = [_read(it, start, p * step, self.kept, total.element) for p in range(slots.partners - 1)]
        own: Operand = it.digit("warp", layout.subgroup_strides[dim], layout.subgroup[dim])
        before = parts[0]
        for number, part in enumerate(parts[1:], 2):
            before = self.where(it.compare("sge", own, number), self.join(before, part), before)
        is_later = it.compare("sge", own, 1)
        return [[self.where(is_later, self.join(before, piece), piece) for piece in row] for row in pieces]
