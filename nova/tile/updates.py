"""What a scatter writes: updates of places, each with a row of values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nova.tile.builder import Program
from nova.tile.layout import NestedLayout
from nova.tile.text import Operand, Value
from nova.tile.whole_op import Op, combination, decode, dot, vector_of
from nova.tile.widths import position_type

# (program, tile of update numbers, where they exist) -> (their places, which of those exist)
Key = Callable[[Program, Value, Value], tuple[Value, Value]]


@dataclass
class Updates:
    """Update u = (u0, u1, ..) of `picked` combines values[u . picked_strides + j . value_strides] into the result at
    place . place_strides + j . rest_strides, for all j of `rest`; its place (k0, k1, ..) of `places_shape` is a key."""

    count: int
    picked: list[int]
    picked_strides: list[int]
    values: int  # operand
    places_shape: list[int]
    place_strides: list[int]
    rest: list[int]
    rest_strides: list[int]
    value_strides: list[int]
    reduce: str
    key: Key
    fresh: bool = False  # places that no update before this launch has written hold zeros

    def __post_init__(self) -> None:
        self._merge()

    def _merge(self) -> None:
        """Neighbouring dimensions of `rest` that are one in memory become one."""
        merged: list[tuple[int, int, int]] = []
        for size, to, of in zip(self.rest, self.rest_strides, self.value_strides, strict=True):
            if size == 1:
                continue
            if merged and (merged[-1][1], merged[-1][2]) == (size * to, size * of):
                merged[-1] = (merged[-1][0] * size, to, of)
            else:
                merged.append((size, to, of))
        self.rest, self.rest_strides, self.value_strides = (list(x) for x in zip(*merged, strict=True)) if merged else (
            [], [], []
        )  # fmt: skip

    @property
    def places(self) -> int:
        return math.prod(self.places_shape)

    @property
    def columns(self) -> int:
        return math.prod(self.rest)

    def vector(self, op: Op) -> int:
        """Neighbouring columns that one access may move."""
        if not self.rest or self.rest_strides[-1] != 1 or self.value_strides[-1] != 1:
            return 1
        strides = [*self.rest_strides[:-1], *self.value_strides[:-1], *self.place_strides, *self.picked_strides]
        return vector_of(op.element(0), self.rest[-1], *strides)

    def wide(self, op: Op) -> str:
        """The type of positions in memory."""
        sizes = [math.prod(op.result_shape()), math.prod(op.shape(self.values))]
        return position_type(max(sizes))


class Columns:
    """A tile of columns of updates or places: dimension 1 of `layout`, whose dimension 0 is theirs."""

    def __init__(self, op: Op, p: Program, updates: Updates, layout: NestedLayout, first: Operand):
        self.op, self.p, self.updates, self.layout = op, p, updates, layout
        self.type, self.vector = updates.wide(op), updates.vector(op)
        self.element = op.element(0)
        self.running = {"bf16": "f32", "f16": "f32"}.get(self.element, self.element)
        row = layout.project([0])
        column = p.binary("arith.addi", p.iota(0, row), first)
        self.inside = p.cmp("slt", column, updates.columns)
        coordinates = decode(p, p.convert(column, self.type), updates.rest)
        self.to, self.of = (self._along(coordinates, s) for s in (updates.rest_strides, updates.value_strides))

    def _along(self, coordinates: list[Operand], strides: list[int]) -> Value:
        """What the columns add to positions."""
        row = self.layout.project([0])
        nothing = self.p.splat(self.p.scalar(0, self.type), row.shape, self.type, row)
        found = dot(self.p, coordinates, strides, nothing) if strides else nothing
        assert isinstance(found, Value)
        return found

    def rows(self, tile: Value) -> Value:
        """A tile over dimension 0, repeated along the columns."""
        return self.p.expand(tile, [1], self.layout)

    def columns(self, tile: Value) -> Value:
        return self.p.expand(tile, [0], self.layout)

    def mask(self, rows: Value) -> Value:
        return self.p.binary("arith.andi", self.rows(rows), self.columns(self.inside))

    def destination(self, key: Value) -> Value:
        """Positions in the result of the places with these keys."""
        base = self._position(key, self.updates.places_shape, self.updates.place_strides)
        return self.p.binary("arith.addi", self.rows(base), self.columns(self.to))

    def source(self, u: Value) -> Value:
        """Positions of the values of updates."""
        base = self._position(u, self.updates.picked, self.updates.picked_strides)
        return self.p.binary("arith.addi", self.rows(base), self.columns(self.of))

    def _position(self, flat: Value, shape: list[int], strides: list[int]) -> Value:
        wide = self.p.convert(flat, self.type)
        zero = self.p.binary("arith.muli", wide, 0)
        found = dot(self.p, decode(self.p, wide, shape), strides, zero)
        assert isinstance(found, Value)
        return found

    def load(self, pointer: Value, place: Value, mask: Value, fill: float | int = 0) -> Value:
        """Values in the type in which they are combined."""
        tile = self.p.gather(pointer, place, self.element, mask, vector=self.vector, fill=fill)
        return self.p.convert(tile, self.running)

    def store(self, tile: Value, pointer: Value, place: Value, mask: Value) -> None:
        self.p.scatter(self.p.convert(tile, self.element), pointer, place, mask, vector=self.vector)

    def combine(self, total: Value, value: Value) -> Value:
        if self.updates.reduce == "none":
            return value
        return self.p.binary(combination(self.updates.reduce, self.running), total, value)
