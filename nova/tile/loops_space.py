"""The tiles of one nest: where they lie along the kernel's loops, and how tensors are read and written there.

    dimensions   ROW        rows of the tile; the row loops in one long loop
                 UNROLL     vectors that a thread handles one after the other
                 GROUP      vectors side by side
                 VECTOR     elements of a vector: neighbours along the innermost column loop

    row = row0 + i0        column = ((group0 + i1 * groups + i2) * vector + i3)

An access whose offset is linear in row and column is a `load`; another computes its offsets on the few dimensions
along which they vary and is a `gather`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nova.fusion.kernel import Index, Kernel, Linear, Tensor
from nova.tile.builder import Program
from nova.tile.expressions import Domain, Part, Sources, memory_element
from nova.tile.layout import NestedLayout
from nova.tile.loops_plan import flat
from nova.tile.text import BITS, Operand, Value
from nova.tile.widths import is_wide, number_type, position_type

ROW, UNROLL, GROUP, VECTOR = range(4)


@dataclass
class Memory:
    """The pointers of a launch: arguments, and locals that live in the workspace."""

    program: Program
    places: Mapping[Tensor, int]  # argument number
    workspace: Mapping[Tensor, int]  # byte offset
    arguments: int  # operands and results; then come the workspace and the error record

    def __post_init__(self) -> None:
        self.made: dict[tuple[Tensor, int], Value] = {}

    def pointer(self, tensor: Tensor) -> Value:
        if tensor in self.places:
            return self.program.args[self.places[tensor]]
        offset = self.workspace[tensor]
        base = self.program.args[self.arguments]
        return self.program.advance(base, offset, "i8") if offset else base

    @property
    def record(self) -> Value:
        return self.program.args[self.arguments + 1]


@dataclass(frozen=True)
class Frame:
    """What tiles of a nest have in common."""

    kernel: Kernel
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    vector: int
    turned: NestedLayout | None = None  # for operands whose neighbours lie along the rows

    @property
    def row_count(self) -> int:
        return math.prod(self.kernel.loops[loop] for loop in self.rows)

    @property
    def group_count(self) -> int:
        return math.prod(self.kernel.loops[loop] for loop in self.columns) // self.vector

    @property
    def row_number(self) -> str:
        """The type of a row's number."""
        return number_type(self.row_count)

    @property
    def group_number(self) -> str:
        return number_type(self.group_count)


@dataclass
class Place:
    """Where an access lies: base + rows * row + columns * column, or other parts that are added."""

    base: Operand
    row: int | None
    column: int | None
    parts: list[Part]
    element: str  # of the offsets
    linear: Linear


class Space(Sources):
    """One tile at a place that may be known at run time only."""

    def __init__(
        self, frame: Frame, memory: Memory, layout: NestedLayout, fixed: Mapping[int, Operand], row0: Operand = 0,
        group0: Operand = 0, ragged_rows: bool = False, ragged_groups: bool = False,
    ):  # fmt: skip
        self.frame, self.memory, self.program = frame, memory, memory.program
        self.domain = Domain(memory.program, layout)
        self.sizes = frame.kernel.loops
        self.fixed, self.row0, self.group0 = dict(fixed), row0, group0
        self.ragged_rows, self.ragged_groups = ragged_rows, ragged_groups
        self.loops: dict[int, list[Part]] = {}
        self.masks: dict[tuple[int, ...], Part | None] = {}
        if layout.shape[ROW] == 1 and len(frame.rows) >= 1:
            self.fixed.update(decode(self.program, row0, frame.rows, self.sizes))

    # --- coordinates ---

    def row(self) -> list[Part]:
        return [Part(self.row0, (), self.frame.row_number), self.domain.iota(ROW)]

    def group(self) -> list[Part]:
        step = self.domain.layout.shape[GROUP]
        unrolled = self.domain.scale(self.domain.iota(UNROLL), step)
        return [Part(self.group0, (), self.frame.group_number), unrolled, self.domain.iota(GROUP)]

    def row_total(self) -> Part:
        return self.domain.total(self.row(), self.frame.row_number)

    def group_total(self) -> Part:
        return self.domain.total(self.group(), self.frame.group_number)

    def loop(self, loop: int) -> list[Part]:
        if loop not in self.loops:
            self.loops[loop] = self._loop(loop)
        return self.loops[loop]

    def _loop(self, loop: int) -> list[Part]:
        domain, frame = self.domain, self.frame
        if loop in self.fixed:
            index = self.fixed[loop]
            return [Part(index, (), index.element if isinstance(index, Value) else "i32")]
        size = self.sizes[loop]
        if size == 1:
            return [Part(0, (), "i32")]
        if loop in frame.rows:
            if len(frame.rows) == 1:
                return self.row()
            return [self._digit(self.row_total(), self._step(frame.rows, loop), size, loop == frame.rows[0])]
        if loop not in frame.columns:
            return super().loop(loop)
        vector = frame.vector
        if loop != frame.columns[-1]:
            step = self._step(frame.columns, loop) // vector
            return [self._digit(self.group_total(), step, size, loop == frame.columns[0])]
        if len(frame.columns) == 1:
            groups = self.group()
        else:
            groups = [domain.remainder(self.group_total(), size // vector)]
        wide = max(number_type(size), frame.group_number)  # there are more elements than vectors
        return [*(domain.scale(domain.convert(part, wide), vector) for part in groups), domain.iota(VECTOR)]

    def _step(self, loops: Sequence[int], loop: int) -> int:
        return math.prod(self.sizes[inner] for inner in loops[loops.index(loop) + 1 :])

    def _digit(self, number: Part, step: int, size: int, first: bool) -> Part:
        digit = self.domain.divide(number, step)
        return digit if first else self.domain.remainder(digit, size)

    def mask(self, dims: tuple[int, ...]) -> Part | None:
        key = tuple(d for d in dims if (d == ROW and self.ragged_rows) or (d in (UNROLL, GROUP) and self.ragged_groups))
        if key not in self.masks:
            tests = []
            if ROW in key:
                tests.append((self.row_total(), self.frame.row_count))
            if key and key != (ROW,):
                tests.append((self.group_total(), self.frame.group_count))
            parts = [self.domain.apply(lambda x, n=n: self.program.cmp("slt", x, n), (p,)) for p, n in tests]
            whole = parts[0] if parts else None
            for part in parts[1:]:
                assert whole is not None
                whole = self.domain.apply(lambda x, y: self.program.binary("arith.andi", x, y), (whole, part))
            self.masks[key] = whole
        return self.masks[key]

    def pointer(self, tensor: Tensor) -> Value:
        return self.memory.pointer(tensor)

    def record(self) -> Value:
        return self.memory.record

    # --- accesses ---

    def place(self, tensor: Tensor, index: Index) -> Place:
        linear = flat(tensor, index)
        terms = dict(linear.terms)
        element = position_type(tensor.numel)
        place = Place(linear.const, 0, 0, [], element, linear)
        for loop, coefficient in linear.terms:
            if loop in self.fixed:
                value = self.program.cast(self.fixed[loop], element)
                place.base = self.program.add(place.base, self.program.mul(value, coefficient))
        rows = () if self.domain.layout.shape[ROW] == 1 else self.frame.rows
        place.row = self._stride(rows, terms)
        place.column = self._stride(self.frame.columns, terms)
        if place.row is None:
            place.parts += self._spread(rows, terms, element)
        if place.column is None:
            place.parts += self._spread(self.frame.columns, terms, element)
        return place

    def _stride(self, loops: tuple[int, ...], terms: dict[int, int]) -> int | None:
        """What one step along the loops, taken as one, adds; None if that varies."""
        if not loops:
            return 0
        unit = terms.get(loops[-1], 0) if self.sizes[loops[-1]] > 1 else None
        for loop in reversed(loops):
            if self.sizes[loop] == 1:
                continue
            step = self._step(loops, loop)
            if unit is None:
                unit, rest = divmod(terms.get(loop, 0), step)
                if rest:
                    return None
            if terms.get(loop, 0) != unit * step:
                return None
        return unit or 0

    def _spread(self, loops: Sequence[int], terms: dict[int, int], element: str) -> list[Part]:
        parts = []
        for loop in loops:
            if terms.get(loop):
                parts += [self.domain.scale(self.domain.convert(p, element), terms[loop]) for p in self.loop(loop)]
        return parts

    def read(self, tensor: Tensor, index: Index) -> Part:
        """tensor[index] from memory."""
        place, memory = self.place(tensor, index), memory_element(tensor.dtype)
        if place.parts:
            return self.gather(tensor, place)
        window = self.window(place)
        if not window.dims:
            value = self.program.load_scalar(self.pointer(tensor), window.base, memory)
            return Part(value, (), memory)
        turned = self.frame.turned
        if turned is not None and place.row == 1 and (UNROLL in window.dims or GROUP in window.dims):
            layout = turned.project([d for d in range(4) if d not in window.dims])
            vector = self.run(place, tensor, self.frame.row_count, layout.element[0], self.frame.rows)
            return Part(
                self.program.to_layout(
                    window.load(self, tensor, memory, layout, vector), self.domain.at(window.dims)
                ), window.dims, memory,
            )  # fmt: skip
        vector = self.vector(place, tensor) if VECTOR in window.dims else 1
        return Part(window.load(self, tensor, memory, self.domain.at(window.dims), vector), window.dims, memory)

    def write(self, tensor: Tensor, index: Index, part: Part) -> None:
        """tensor[index] = part."""
        place, program = self.place(tensor, index), self.program
        part = self.domain.convert(part, memory_element(tensor.dtype))
        if place.parts:
            where = self.offsets(place)
            value = self.domain.whole(part, where.dims)
            mask = self.mask(where.dims)
            inside = None if mask is None else self.domain.whole(mask, where.dims)
            vector = self.vector(place, tensor) if VECTOR in where.dims else 1
            program.scatter(value, self.pointer(tensor), self.domain.whole(where, where.dims), inside, vector=vector)
            return
        window = self.window(place)
        if not window.dims:
            program.store_scalar(self.domain.value(part), self.pointer(tensor), window.base)
            return
        value, vector = self.domain.whole(part, window.dims), 1
        turned = self.frame.turned
        if turned is not None and place.row == 1 and (UNROLL in window.dims or GROUP in window.dims):
            layout = turned.project([d for d in range(4) if d not in window.dims])
            value = program.to_layout(value, layout)
            vector = self.run(place, tensor, self.frame.row_count, layout.element[0], self.frame.rows)
        elif VECTOR in window.dims:
            vector = self.vector(place, tensor)
        program.store(
            value, self.pointer(tensor), window.base, window.offsets, strides=window.strides, extents=window.extents,
            vector=vector, wide=is_wide(tensor.numel),
        )  # fmt: skip

    def vector(self, place: Place, tensor: Tensor) -> int:
        """Elements along the vector dimension that one access may move."""
        terms = dict(place.linear.terms)
        if terms.get(self.frame.columns[-1]) != 1:
            return 1
        return self.run(place, tensor, 0, self.domain.layout.element[VECTOR], self.frame.columns[-1:])

    def run(self, place: Place, tensor: Tensor, size: int, most: int, lanes: tuple[int, ...]) -> int:
        """The longest run of neighbours at most `most` long that is aligned and not cut by `size`."""
        most = min(most, 128 // max(BITS[memory_element(tensor.dtype)], 8))
        numbers = [place.linear.const, size]
        numbers += [c for loop, c in place.linear.terms if loop not in lanes and self.sizes[loop] > 1]
        while most > 1 and any(number % most for number in numbers):
            most //= 2
        return most

    def window(self, place: Place) -> Window:
        shape, frame = self.domain.layout.shape, self.frame
        row, column = place.row or 0, (place.column or 0) * frame.vector
        strides = {ROW: row, UNROLL: column * shape[GROUP], GROUP: column, VECTOR: place.column or 0}
        starts: dict[int, Operand] = {ROW: self.row0, UNROLL: 0, GROUP: self.group0, VECTOR: 0}
        extents = {
            ROW: frame.row_count if self.ragged_rows else -1, UNROLL: -1,
            GROUP: frame.group_count if self.ragged_groups else -1, VECTOR: -1,
        }  # fmt: skip
        base = place.base
        dims = tuple(d for d in range(4) if shape[d] > 1 and strides[d])
        for d in range(4):
            if d not in dims and strides[d] and starts[d] != 0 and not (d == ROW and shape[ROW] == 1):
                start = self.program.cast(starts[d], place.element)
                base = self.program.add(base, self.program.mul(start, strides[d]))
        return Window(
            base, dims, [starts[d] for d in dims], [strides[d] for d in dims], [extents[d] for d in dims]
        )  # fmt: skip

    def offsets(self, place: Place) -> Part:
        """The offset of every element, over the dimensions along which it varies."""
        parts = [Part(place.base, (), place.element), *place.parts]
        for stride, own in ((place.row, self.row), (place.column, self.column)):
            if stride:
                parts += [self.domain.scale(self.domain.convert(p, place.element), stride) for p in own()]
        return self.domain.total(parts, place.element)

    def column(self) -> list[Part]:
        return [*(self.domain.scale(part, self.frame.vector) for part in self.group()), self.domain.iota(VECTOR)]

    def gather(self, tensor: Tensor, place: Place) -> Part:
        where, memory = self.offsets(place), memory_element(tensor.dtype)
        if not where.dims:
            base = self.domain.value(where)
            return Part(self.program.load_scalar(self.pointer(tensor), base, memory), (), memory)
        mask = self.mask(where.dims)
        vector = self.vector(place, tensor) if VECTOR in where.dims else 1
        inside = None if mask is None else self.domain.whole(mask, where.dims)
        value = self.program.gather(
            self.pointer(tensor), self.domain.whole(where, where.dims), memory, inside, vector=vector
        )  # fmt: skip
        return Part(value, where.dims, memory)


@dataclass
class Window:
    """The operands of a load or store."""

    base: Operand
    dims: tuple[int, ...]
    offsets: list[Operand]
    strides: list[int]
    extents: list[int]

    def load(self, space: Space, tensor: Tensor, memory: str, layout: NestedLayout, vector: int) -> Value:
        return space.program.load(
            space.pointer(tensor), self.base, self.offsets, memory, layout, strides=self.strides,
            extents=self.extents, vector=vector, wide=is_wide(tensor.numel),
        )  # fmt: skip


def decode(program: Program, number: Operand, loops: Sequence[int], sizes: Sequence[int]) -> dict[int, Operand]:
    """The loops' indices from their number in row-major order; uniform."""
    found: dict[int, Operand] = {}
    for loop in reversed(loops):
        if loop == loops[0]:
            found[loop] = number
        else:
            found[loop] = program.rem(number, sizes[loop])
            number = program.div(number, sizes[loop])
    return found
