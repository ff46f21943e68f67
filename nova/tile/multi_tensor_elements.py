"""The launch of a multi-tensor kernel that moves the elements."""

from __future__ import annotations

import copy

from nova.fusion.kernel import Out, Tensor
from nova.tile.builder import Program
from nova.tile.combine import identity
from nova.tile.expressions import Domain, Evaluator, Part, memory_element
from nova.tile.layout import NestedLayout, blocked
from nova.tile.multi_tensor_launch import Launch, Scalars
from nova.tile.multi_tensor_plan import TENSORS, THREADS, Plan, blocks_per_sm, streams, unit_of
from nova.tile.text import BITS, Operand, Value

RAGGED = 2  # elements of a thread where a unit is not whole or not aligned


class _Elements(Scalars):
    """Elements of one tensor beside its scalars: `at` is a unit's start, `mask` its part inside the tensor."""

    def __init__(self, launch: Launch, number: Operand, layout: NestedLayout):
        super().__init__(launch, number)
        self.layout, self.domain = layout, Domain(launch.program, layout)
        self.pointers = {tensor: launch.pointer(tensor, number) for tensor in streams(launch.plan)}
        self.at: Operand = 0
        self.inside: tuple[Value, Value] | None = None  # (index, mask) where not all of a unit is

    def by_element(self, layout: NestedLayout) -> _Elements:
        """The same tensor, for units that are not whole or not aligned."""
        found = copy.copy(self)
        found.layout, found.domain, found.known = layout, Domain(self.launch.program, layout), dict(self.known)
        return found

    def begin(self, at: Operand, rest: Operand | None = None) -> None:
        """A unit from element `at`; `rest`: elements from there on, if they may be fewer than the unit's."""
        p = self.launch.program
        self.at, self.inside = at, None
        self.known = {t: part for t, part in self.known.items() if not part.dims}
        if rest is not None:
            index = p.iota(0, self.layout)
            self.inside = index, p.cmp("slt", index, p.cast(rest, "i32"))

    def _vector(self, tensor: Tensor) -> int:
        return min(self.layout.element[0], 128 // max(BITS[memory_element(tensor.dtype)], 8))

    def read(self, tensor: Tensor) -> Part:
        if tensor not in self.pointers:
            return super().read(tensor)
        p, element = self.launch.program, memory_element(tensor.dtype)
        if self.inside is None:
            tile = p.load(
                self.pointers[tensor], self.at, [0], element, self.layout, strides=[1], vector=self._vector(tensor)
            )
        else:
            tile = p.gather(p.advance(self.pointers[tensor], self.at, element), self.inside[0], element, self.inside[1])
        return Part(tile, (0,), element)

    def write(self, tensor: Tensor, tile: Value) -> None:
        p, pointer = self.launch.program, self.pointers[tensor]
        if self.inside is None:
            p.store(tile, pointer, self.at, [0], strides=[1], vector=self._vector(tensor))
        else:
            p.scatter(tile, p.advance(pointer, self.at, tile.element), *self.inside)

    def mask(self, dims: tuple[int, ...]) -> Part | None:
        return None if self.inside is None else Part(self.inside[1], (0,), "i1")


def elements(plan: Plan) -> Program:
    launch = Launch(plan, "elements", plan.grid, THREADS, blocks_per_sm(plan))
    p = launch.program
    unit, layout = unit_of(plan)
    block = p.program_id(0)
    begin, end = _span(launch, block)
    with p.if_(p.compare("slt", begin, end)):
        last = p.add(_search(launch, p.sub(end, 1)), 1)
        with p.for_(_search(launch, begin), last, 1) as loop:
            _tensor(launch, loop.index, block, (begin, end), unit, layout)
    return p


def _span(launch: Launch, block: Operand) -> tuple[Operand, Operand]:
    """A block's share of the units."""
    p = launch.program
    begin = p.mul(block, share(launch))
    units = launch.first(launch.count)
    begin = p.min(begin, units)
    return begin, p.min(p.add(begin, share(launch)), units)


def share(launch: Launch) -> Operand:
    """Units of a block."""
    return launch.program.cdiv(launch.first(launch.count), launch.plan.grid)


def _search(launch: Launch, unit: Operand) -> Value:
    """The tensor of a unit: the last whose first unit is not after it."""
    p = launch.program
    steps: Operand = 0
    for bit in range(TENSORS.bit_length() - 1):
        is_more = Value(p.fresh(), "i32")
        p.line(f"{is_more.name} = arith.extui {p.compare('sgt', launch.count, 1 << bit).name} : i1 to i32")
        steps = p.add(steps, is_more)
    with p.for_(0, steps, 1, [p.scalar(0), p.scalar(launch.count)]) as loop:
        low, high = loop.carried
        middle = p.div(p.add(low, high), 2)
        before = p.compare("sle", launch.first(middle), unit)
        loop.yield_([p.select(before, middle, low), p.select(before, high, middle)])
    return loop.results[0]


def _tensor(
    launch: Launch, number: Operand, block: Operand, span: tuple[Operand, Operand], unit: int, layout: NestedLayout
) -> None:
    """The units of one tensor in a block's share: whole ones in vectors if it is aligned, the others by element."""
    p, plan = launch.program, launch.plan
    numel = p.load_scalar(p.load_pointer(launch.table, 1), p.cast(number, "i64"), "i64")
    first = launch.first(number)
    begin = p.sub(p.max(span[0], first), first)
    end = p.sub(p.min(span[1], launch.first(p.add(number, 1))), first)
    source = _Elements(launch, number, layout)
    _preload(plan, source)
    whole = p.min(end, p.cast(p.div(numel, unit), "i32"))
    middle = p.max(begin, p.select(_aligned(launch, source), whole, begin))
    with p.for_(begin, middle, 1, _starts(plan, source)) as loop:
        source.begin(p.mul(p.cast(loop.index, "i64"), unit))
        loop.yield_(_update(plan, source, loop.carried))

    few = THREADS * RAGGED
    rest_source = source.by_element(blocked([few], [THREADS // 32], [32]))
    at = p.mul(p.cast(middle, "i64"), unit)
    left = p.sub(p.min(p.mul(p.cast(end, "i64"), unit), numel), at)  # negative if a tensor ends before this share
    left = p.cast(p.max(left, 0), "i32")
    with p.for_(0, p.cdiv(left, few), 1, _starts(plan, rest_source)) as rest:
        done = p.mul(rest.index, few)
        rest_source.begin(p.add(at, p.cast(done, "i64")), p.sub(left, done))
        rest.yield_(_update(plan, rest_source, rest.carried))
    place = p.cast(p.add(number, block), "i64")
    for (tensor, out), *parts in zip(plan.partials.items(), loop.results, rest.results, strict=True):
        vectors, others = (p.reduce(part, [0], str(out.combine).split(".")[1]) for part in parts)
        p.store_scalar(p.binary(str(out.combine), vectors, others), launch.slot(plan.slots[tensor]), place)


def _starts(plan: Plan, source: _Elements) -> list[Value]:
    domain = source.domain
    return [domain.whole(Part(start(out), (), memory_element(t.dtype))) for t, out in plan.partials.items()]


def start(out: Out) -> float | int:
    return identity(str(out.combine), out.tensor.dtype)


def _preload(plan: Plan, source: _Elements) -> None:
    """Scalars that the elements use, before the loops over them."""
    for op in plan.elements:
        for tensor, index in op.loads():
            if tensor.kind == "saved":
                source.load(tensor, index)


def _aligned(launch: Launch, source: _Elements) -> Value:
    """Whether all pointers allow 16-byte accesses."""
    p = launch.program
    bits: Operand = 0
    for pointer in source.pointers.values():
        address = p.address(pointer)
        bits = address if isinstance(bits, int) else p.int_op("ori", bits, address)
    return p.compare("eq", p.int_op("andi", p.scalar(bits, "i64"), 15), 0)


def _update(plan: Plan, source: _Elements, carried: list[Value]) -> list[Value]:
    """All ops on one unit; what they store is stored at the end. Returns the reductions so far."""
    domain = source.domain
    evaluator = Evaluator(domain, source)
    sums = dict(zip(plan.partials, carried, strict=True))
    pending: list[tuple[Tensor, Value]] = []
    for op in plan.elements:
        for out, part in zip(op.outs, evaluator.emit([out.value for out in op.outs]), strict=True):
            if out.combine is not None:
                sums[out.tensor] = _combine(source, out, sums[out.tensor], part)
                continue
            source.known[out.tensor] = part
            if out.tensor.kind == "out":
                pending.append((out.tensor, domain.whole(part)))
    for tensor, tile in pending:
        source.write(tensor, tile)
    return [sums[tensor] for tensor in plan.partials]


def _combine(source: _Elements, out: Out, total: Value, part: Part) -> Value:
    p = source.domain.program
    value = source.domain.whole(part)
    if source.inside is not None:
        value = p.select(source.inside[1], value, start(out))
    return p.binary(str(out.combine), total, value)
