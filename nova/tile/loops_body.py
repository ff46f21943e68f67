"""The ops of a nest on one tile: values in registers, reductions along the columns, stores at the end.

    body = Body(space.., nest, stored)
    for op in nest.ops: body.run(op)          loads when first needed, values kept by (tensor, index)
    body.flush()                              all stores: so that loads stand in front of them

What a body makes is looked up where another op reads it; anything else is read from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from nova.fusion.kernel import FLOAT_TYPES, Expr, Index, Structured, Tensor
from nova.tile.builder import Program
from nova.tile.expressions import CONTRACT, NARROW, Domain, Evaluator, Part, memory_element
from nova.tile.loops_plan import Key, Nest, Total
from nova.tile.loops_space import ROW, Space
from nova.tile.text import BITS, Value

UNSIGNED = frozenset({"arith.maxui", "arith.minui", "arith.andi", "arith.ori", "arith.xori"})


def identity(combine: str, element: str) -> float | int:
    """What leaves the other operand as it is."""
    kind = combine.removeprefix("arith.")
    if element in FLOAT_TYPES:
        numbers = {"addf": 0.0, "mulf": 1.0, "maximumf": -math.inf, "maxnumf": -math.inf}
        return numbers.get(kind, math.inf)
    bits = BITS[element]
    low, high = (0, 1) if bits == 1 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    ones = 1 if bits == 1 else -1
    return {"addi": 0, "muli": 1, "maxsi": low, "minsi": high, "maxui": 0, "minui": ones, "andi": ones}.get(kind, 0)


def computed(element: str) -> str:
    """The type in which values of a type are reduced."""
    if element in NARROW:
        return "f32"
    return "i32" if element in ("i1", "i8", "i16") else element


def start_of(combine: str, element: str) -> float | int:
    """The identity, in the type of the reduction."""
    number = identity(combine, element)
    if element == "i1" and combine in ("arith.andi", "arith.minui"):
        return 1
    if element in ("i8", "i16") and combine == "arith.minui":
        return (1 << BITS[element]) - 1
    return number


def widened(domain: Domain, part: Part, combine: str) -> Part:
    """A part in the type of the reduction."""
    return domain.convert(part, computed(part.element), combine not in UNSIGNED and part.element != "i1")


def combined(domain: Domain, combine: str, a: Part, b: Part) -> Part:
    attrs = CONTRACT if combine == "arith.addf" else ""
    return domain.apply(lambda x, y: domain.program.binary(combine, x, y, attrs), (a, b))


def finished(domain: Domain, part: Part, combine: str, init: float | int, element: str) -> Part:
    """A reduction's result: with its initial value, in the out's type."""
    if init != identity(combine, element) and not (init == 0 and combine == "arith.addf"):
        part = combined(domain, combine, part, Part(init, (), part.element))
    return domain.convert(part, element)


class Body(Space):
    """One tile with the values that the nest's ops have made there."""

    nest: Nest
    stored: frozenset[Tensor]  # tensors that other nests read from memory

    def setup(self, nest: Nest, stored: frozenset[Tensor], once: Value | None = None) -> Body:
        """`once`: holds in one of the blocks that share these rows; it stores what there is one of a row."""
        self.nest, self.stored, self.once = nest, stored, once
        self.nests = [nest]
        self.evaluator = Evaluator(self.domain, self)
        self.values: dict[Key, Part] = {}
        self.waiting: list[tuple[Callable[[], None], bool]] = []
        self.later: dict[Key, Structured] = {}  # made where it is needed
        return self

    def load(self, tensor: Tensor, index: Index) -> Part:
        key = (tensor, index)
        if key not in self.values:
            op = self.later.get(key)
            if op is not None:
                self.elementwise(op, store=False)
            else:
                self.values[key] = self.read(tensor, index)
        return self.values[key]

    def made_by(self, tensor: Tensor, index: Index) -> Expr | None:
        for nest in self.nests:
            for op in nest.ops:
                for out in op.outs:
                    if out.tensor is tensor and out.index == index and not op.reduced:
                        return out.value
        return None

    def prefetch(self) -> None:
        """Loads of the nest's full width, in front of everything."""
        for key in self.wide_keys():
            self.load(*key)

    def prefetch_columns(self) -> list[Key]:
        """Loads of what there is one of a column, the same for all rows; their keys in `values`."""
        columns = frozenset(self.frame.columns)
        keys = self._keys(lambda loops: bool(loops) and loops <= columns and loops != self.nest.full)
        for key in keys:
            self.load(*key)
        return keys

    def wide_keys(self) -> list[Key]:
        """What is read of the nest's full width."""
        return self._keys(lambda loops: loops == self.nest.full)

    def row_keys(self) -> list[Key]:
        """What is read of which there is one of a row: a statistic waits as long for memory as the row itself."""
        rows = frozenset(self.frame.rows)
        return self._keys(lambda loops: bool(loops) and loops <= rows and loops != self.nest.full)

    def _keys(self, wanted: Callable[[frozenset[int]], bool]) -> list[Key]:
        made = self.nest.keys()
        keys = []
        for op in self.nest.ops:
            for tensor, index in op.loads():
                loops = frozenset(loop for item in index for loop, _ in item.terms)
                if (tensor, index) not in made and tensor.kind != "local" and wanted(loops):
                    keys.append((tensor, index))
        return list(dict.fromkeys(keys))

    def elementwise(self, op: Structured, store: bool = True) -> None:
        """Evaluates an op; its stores wait for `flush`."""
        for out, part in zip(op.outs, self.evaluator.emit([out.value for out in op.outs]), strict=True):
            self.values[out.tensor, out.index] = self.domain.convert(part, memory_element(out.tensor.dtype))
            if store:
                self.keep(op, out.tensor, out.index)
        if store:
            self.checks(op)

    def checks(self, op: Structured) -> None:
        for check in op.checks:
            self.evaluator.check(check)

    def keep(self, op: Structured, tensor: Tensor, index: Index) -> None:
        """Writes a value to memory, if it must be there."""
        if tensor.kind == "local" and tensor not in self.stored:
            return
        part = self.values[tensor, index]
        self.waiting.append((lambda: self.write(tensor, index, part), self.nest.is_row(op)))

    def flush(self) -> None:
        rows = [write for write, is_row in self.waiting if is_row]
        for write, is_row in self.waiting:
            if not is_row:
                write()
        if rows and self.once is not None:
            with self.program.if_(self.once):
                for write in rows:
                    write()
        else:
            for write in rows:
                write()
        self.waiting = []

    # --- reductions ---

    def column_dims(self) -> tuple[int, ...]:
        return tuple(d for d in self.domain.every if d > ROW)

    def masked(self, part: Part, combine: str, dims: Sequence[int]) -> Part:
        """The part over `dims` and its own, with the identity outside the loops."""
        domain, program = self.domain, self.program
        mask = self.mask(tuple(dims))
        wide = widened(domain, part, combine)
        if mask is None:
            return wide
        start = start_of(combine, part.element)
        return domain.apply(lambda m, x: program.select(m, x, program.constant(start, wide.element)), (mask, wide))

    def reduce(self, ops: Sequence[Structured]) -> None:
        """Reductions along the columns of this tile, which holds them all; none needs another's result."""
        outs = [(op, out) for op in ops for out in op.outs]
        values = self.evaluator.emit([out.value for _, out in outs])
        dims = self.column_dims()
        parts = [self.masked(part, str(out.combine), dims) for (_, out), part in zip(outs, values, strict=True)]
        wholes = [along(self.domain, part, dims) for part in parts]
        totals = [reduced(self.domain, w, dims, str(out.combine)) for (_, out), w in zip(outs, wholes, strict=True)]
        for (_, out), total in zip(outs, totals, strict=True):
            element = memory_element(out.tensor.dtype)
            part = finished(self.domain, total, str(out.combine), out.init, element)
            self.values[out.tensor, out.index] = part
            if out.tensor.kind != "local" or out.tensor in self.stored:
                self.waiting.append((partial(self.write, out.tensor, out.index, part), True))
        for op in ops:
            self.checks(op)

    def share(self, total: Total) -> Part:
        """The tile's contribution to a total, per element."""
        (part,) = self.evaluator.emit([total.out.value])
        assert total.out.combine is not None
        dims = self.total_dims(total)  # what lies outside along the columns is not stored
        return self.masked(part, total.out.combine, tuple(d for d in dims if d == ROW) if total.keeps else dims)

    def total_dims(self, total: Total) -> tuple[int, ...]:
        """Of a total before it is summed within the tile."""
        if self.nest.merges or frozenset(total.op.loops) == self.nest.full:
            return self.domain.every
        return tuple(d for d in self.domain.every if d == ROW)


def along(domain: Domain, part: Part, dims: tuple[int, ...]) -> Part:
    """The part as a tile that has `dims`, along which it is repeated if it does not vary."""
    if not dims:
        return part
    every = tuple(sorted({*part.dims, *dims}))
    return Part(domain.whole(part, every), every, part.element)


def reduced(domain: Domain, part: Part, dims: tuple[int, ...], combine: str) -> Part:
    """Combined along `dims`, along which the part is repeated if it does not vary."""
    if not dims:
        return part
    tile = along(domain, part, dims)
    places = [tile.dims.index(d) for d in dims]
    value = domain.program.reduce(domain.value(tile), places, combine.removeprefix("arith."))
    return Part(value, tuple(d for d in tile.dims if d not in dims), part.element)


def scattered_sum(domain: Domain, part: Part, combine: str, target: Domain) -> Part:
    """Combined along the rows, in the layout of `target`."""
    tile = along(domain, part, (ROW,))
    left = tuple(d for d in tile.dims if d != ROW)
    kind, place = combine.removeprefix("arith."), tile.dims.index(ROW)
    value = domain.program.reduce_scatter(domain.value(tile), [place], kind, target.at(left))
    return Part(value, left, part.element)


def constant_tile(program: Program, domain: Domain, number: float | int, element: str, dims: tuple[int, ...]) -> Value:
    """A tile (or scalar) that a loop may carry."""
    return domain.whole(Part(number, (), element), dims)
