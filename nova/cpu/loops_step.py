"""Emits one step of a row: a loop nest whose innermost loop runs in lanes, shared by several generics.

    p = x + row * 768                              cursors and lane-invariant operations, once
    for i in 0..len step 4 * lanes:                vectors of several registers
      a += load p[i] : vector<32xf32>
    for i in .. step lanes:                        vectors of one register
    for i in .. step 1:                            scalars
    sum = horizontal(a) + tail                     fixed order

A reduction is carried in registers through the loops inside the last loop it keeps, and accumulates in memory (a
partial, its scratch or its destination) across the loops outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nova.cpu import body
from nova.cpu.loops_ir import Access, Generic, Output, Result
from nova.cpu.loops_plan import BLOCK, Step
from nova.cpu.loops_values import (
    Cursor,
    Key,
    Place,
    horizontal,
    identity,
    is_identity,
    loop_i64,
    mul,
    shrink,
    value_of,
)
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.cpu.loops_emit import NestEmitter

LONG_ROW = 4 * BLOCK  # longer sums along lanes go through blocks, so that no accumulator adds more than 128 terms


@dataclass
class Accumulator:
    """One result of a reduction in this step."""

    generic: Generic
    number: int
    level: int  # it is carried in registers through loops level, level + 1, ...; len(inner): in memory
    place: Place | None  # where it accumulates across the loops in front of `level`; None: there are none

    @property
    def key(self) -> Key:
        return self.generic.number, self.number

    @property
    def output(self) -> Output:
        return self.generic.outputs[self.number]


@dataclass
class Carried:
    """An accumulator in registers: a vector part and a scalar part, either may be missing."""

    vector: Value | None
    scalar: Value | None

    def values(self) -> list[Value]:
        return [v for v in (self.vector, self.scalar) if v is not None]


@dataclass
class Heads:
    """What is computed in front of a lane loop, for each generic of the step."""

    cursors: dict[tuple[Value, object], Cursor] = field(default_factory=dict)
    operands: dict[int, list[Value | Cursor | Key | None]] = field(default_factory=dict)
    memory: dict[Key, Cursor] = field(default_factory=dict)  # accumulators in memory
    stores: list[tuple[Key, Cursor, bool]] = field(default_factory=list)  # (result, where, may be nontemporal)
    environments: dict[int, body.Environment] = field(default_factory=dict)


class StepEmitter:
    def __init__(self, nest: NestEmitter, step: Step):
        self.nest, self.step = nest, step
        self.inner = step.inner
        self.lane_dim = step.inner[-1]
        self.lanes = 0 if step.sequential else nest.full_lanes
        self.keys = {g.number for g in step.generics}
        self.accumulators = [
            self._accumulator(g, k) for g in step.generics if g.is_reduction for k in range(len(g.outputs))
        ]
        self.carried = [a for a in self.accumulators if a.level < len(self.inner)]
        self.low: Value | int = 0
        size = nest.sizes[self.lane_dim]
        self.length: Value | int = size
        if self.lane_dim in nest.spans:
            self.low, self.length = nest.spans[self.lane_dim]
        elif nest.nest.split == self.lane_dim:
            self.low = mul(nest.coordinates[self.lane_dim], BLOCK)
            self.length = BLOCK
            if size % BLOCK:
                rest = ln.subi(ln.i64(size), value_of(self.low))
                self.length = ln.minsi(rest, ln.i64(BLOCK))
        self.blocked = isinstance(self.length, int) and self.length > LONG_ROW and bool(self.carried) and self.lanes > 0
        known = self.length if isinstance(self.length, int) and not self.blocked else None
        self.has_vector = self.lanes > 0 and (known is None or known >= self.lanes)
        self.has_scalar = self.lanes == 0 or known is None or known % self.lanes != 0
        self.unroll = self._choose_unroll(known)

    def _choose_unroll(self, known: int | None) -> int:
        """Registers a vector of the main loop: two hide the latency of arithmetic, four that of an accumulator."""
        if not self.lanes or self._has_gathers():
            return 1
        elements = [a.element for g in self.step.generics for a in g.inputs]
        elements += [o.element for g in self.step.generics for o in g.outputs]
        widest = max(ln.bytes_of(e) for e in elements)
        operations = sum(len(list(g.block.operations)) for g in self.step.generics if g.block is not None)
        if self._has_random():
            return 2  # one register of counters gives the words of two registers of elements
        unroll = (4 if self.carried and operations <= 16 else 2) * 4 // max(widest, 4)
        while known is not None and unroll > 1 and unroll * self.lanes > known:
            unroll //= 2
        return max(unroll, 1)

    def _has_gathers(self) -> bool:
        """Whether lanes are loaded one by one: wider vectors would only make more code."""
        for generic in self.step.generics:
            accesses = [a for a in generic.inputs if a not in self.nest.turned]
            accesses += [s for o in generic.outputs for s in o.stores]
            if any(dict(a.linear().terms).get(self.lane_dim, 0) not in (0, 1) for a in accesses):
                return True
            for view in generic.block.operations if generic.block is not None else ():
                if view.operation.name in ("tensor.extract", "nova.check"):
                    return True
        return False

    def _has_random(self) -> bool:
        blocks = [g.block for g in self.step.generics if g.block is not None]
        return any(view.operation.name == "nova.philox" for block in blocks for view in block.operations)

    def _accumulator(self, generic: Generic, number: int) -> Accumulator:
        level = 1 + max(
            (k for k, d in enumerate(self.inner) if d in generic.dims and d not in generic.reduced), default=-1
        )
        key = (generic.number, number)
        output = generic.outputs[number]
        own = Access(Result(*key), output.shape, output.element, output.access_indices)
        place = None
        if key in self.nest.storage.partials:
            place = Place(self.nest.storage.partials[key], own.linear(), output.element)
        elif level > 0:
            place = self.nest.place_of(own)
        return Accumulator(generic, number, level, place)

    def emit(self) -> None:
        for accumulator in self.accumulators:
            if accumulator.place is not None and accumulator.key not in self.nest.storage.partials:
                self._fill(accumulator)
        self._emit_level(0, {})
        for accumulator in self.accumulators:
            if accumulator.place is not None and accumulator.key not in self.nest.storage.partials:
                self._copy_out(accumulator)

    # --- loops ---

    def _emit_level(self, level: int, carried: dict[Key, Carried]) -> dict[Key, Carried]:
        """Emits loops level, level + 1, ... on the accumulators of the loops outside; returns their new values."""
        own = [a for a in self.carried if a.level == level]
        active = dict(carried)
        for accumulator in own:
            active[accumulator.key] = self._start(accumulator)
        if level == len(self.inner) - 1:
            active = self._emit_lanes(active)
        else:
            dim = self.inner[level]

            def iteration(index: Value, values: list[Value]) -> list[Value]:
                self.nest.coordinates[dim] = index
                return _flatten(self._emit_level(level + 1, _unflatten(active, values)))

            active = _unflatten(active, loop_i64(0, self.nest.sizes[dim], 1, _flatten(active), iteration))
        for accumulator in own:
            self._finish(accumulator, active.pop(accumulator.key))
        return active

    def _start(self, accumulator: Accumulator) -> Carried:
        element, combiner = accumulator.output.element, accumulator.output.combiner
        if combiner is None:
            if accumulator.place is not None:
                return Carried(None, self.nest.load_scalar(accumulator.place))
            return Carried(None, self.nest.init_value(accumulator.output))
        vector = identity(combiner, ln.vector_type(element, self.lanes)) if self.has_vector else None
        scalar = identity(combiner, element) if self.has_scalar or not self.has_vector else None
        return Carried(vector, scalar)

    def _finish(self, accumulator: Accumulator, carried: Carried) -> None:
        output, combiner = accumulator.output, accumulator.output.combiner
        total = carried.scalar
        if combiner is not None and carried.vector is not None:
            lanes_total = horizontal(combiner, carried.vector)
            total = lanes_total if total is None else body.combine(combiner, lanes_total, total)
        if accumulator.place is not None:
            if combiner is not None:
                total = body.combine(combiner, self.nest.load_scalar(accumulator.place), total)
            self.nest.store_scalar(total, accumulator.place)
            return
        if combiner is not None and not is_identity(combiner, output.init, output.element):
            total = body.combine(combiner, self.nest.init_value(output), total)
        self.nest.finish_row_value(accumulator.key, output, total)

    def _emit_lanes(self, carried: dict[Key, Carried]) -> dict[Key, Carried]:
        if not self.blocked:
            return self._emit_span(self.low, self.length, carried)
        size = self.length

        def block(low: Value, values: list[Value]) -> list[Value]:
            length = ln.minsi(ln.subi(ln.i64(size), low), ln.i64(BLOCK))
            return _flatten(self._emit_span(low, length, _unflatten(carried, values)))

        return _unflatten(carried, loop_i64(0, size, BLOCK, _flatten(carried), block))

    def _emit_span(self, low: Value | int, length: Value | int, carried: dict[Key, Carried]) -> dict[Key, Carried]:
        """The lane loop over low .. low + length."""
        nest = self.nest
        nest.lane_dim, nest.lane_low = self.lane_dim, low
        heads = self._heads()
        if isinstance(length, int):
            vectors = length // self.lanes * self.lanes if self.lanes else 0
            main = length // (self.lanes * self.unroll) * (self.lanes * self.unroll) if self.lanes else 0
        else:
            mask = ln.i64(-self.lanes)
            vectors = ln.andi(length, mask)
            main = ln.andi(length, ln.i64(-self.lanes * self.unroll))
        result = {key: Carried(c.vector, c.scalar) for key, c in carried.items()}
        begin: Value | int = 0
        if self.has_vector and self.unroll > 1:
            self._emit_main(heads, main, result)
            begin = main
        if self.has_vector:
            keys = [key for key, c in result.items() if c.vector is not None]

            def vector(i: Value, values: list[Value]) -> list[Value]:
                return self._body(heads, i, self.lanes, dict(zip(keys, values, strict=True)), keys)

            final = loop_i64(begin, vectors, self.lanes, [result[k].vector for k in keys], vector)
            for key, value in zip(keys, final, strict=True):
                result[key].vector = value
        if self.has_scalar:
            keys = [key for key, c in result.items() if c.scalar is not None]

            def scalar(i: Value, values: list[Value]) -> list[Value]:
                return self._body(heads, i, 0, dict(zip(keys, values, strict=True)), keys)

            final = loop_i64(vectors, length, 1, [result[k].scalar for k in keys], scalar)
            for key, value in zip(keys, final, strict=True):
                result[key].scalar = value
        nest.lane_dim, nest.lane_low, nest.lane_index = None, 0, None
        return result

    def _emit_main(self, heads: Heads, end: Value | int, result: dict[Key, Carried]) -> None:
        """The wide loop. Its vectors span several registers, which LLVM splits into as many independent chains."""
        keys = [key for key, c in result.items() if c.vector is not None]
        combiners = {a.key: a.output.combiner for a in self.carried if a.output.combiner is not None}
        wide = self.lanes * self.unroll
        vectors = [c.vector for c in result.values() if c.vector is not None]
        inits = [
            identity(combiners[k], ln.vector_type(ln.element_of(v.type), wide))
            for k, v in zip(keys, vectors, strict=True)
        ]

        def iteration(i: Value, values: list[Value]) -> list[Value]:
            updated = self._body(heads, i, wide, dict(zip(keys, values, strict=True)), keys)
            if self.nest.nest.prefetch:
                self._prefetch(heads, i)
            return updated

        final = loop_i64(0, end, wide, inits, iteration)
        for key, value in zip(keys, final, strict=True):
            narrow = shrink(combiners[key], value, self.lanes)
            result[key].vector = body.combine(combiners[key], result[key].vector, narrow)

    # --- the body of a lane loop ---

    def _heads(self) -> Heads:
        heads = Heads()
        for generic in self.step.generics:
            accesses = [*generic.operands, *(o.init.access if o.reads_init else None for o in generic.outputs)]
            if generic.is_reduction:
                accesses[len(generic.operands) :] = [None] * len(generic.outputs)
            heads.operands[generic.number] = [self._head(heads, access) for access in accesses]
            for accumulator in self.accumulators:
                if accumulator.generic is generic and accumulator.level == len(self.inner):
                    assert accumulator.place is not None
                    heads.memory[accumulator.key] = self._cached(heads, accumulator.place)
            if not generic.is_reduction:
                self._head_stores(heads, generic)
        for generic in self.step.generics:
            if generic.block is None:
                continue
            known: list[Value | None] = []
            for operand in heads.operands[generic.number]:
                if isinstance(operand, Cursor):
                    known.append(operand.uniform)
                else:
                    known.append(operand if isinstance(operand, ir.Value) else None)
            self.nest.dims = generic.dims
            self.nest.lanes = self.lanes
            heads.environments[generic.number] = body.hoist_uniform(generic.block, known, self.nest)
        return heads

    def _head(self, heads: Heads, access: Access | None) -> Value | Cursor | Key | None:
        if access is None:
            return None
        if isinstance(access.source, Result):
            key = (access.source.generic, access.source.number)
            value = self.nest.row_values.get(key)
            if value is not None:
                return value
            if access.source.generic in self.keys:
                return key
        cursor = self._cached(heads, self.nest.place_of(access))
        if cursor.stride == 0 and cursor.uniform is None:
            cursor.uniform = ln.load(cursor.pointer, cursor.element)
        return cursor

    def _cached(self, heads: Heads, place: Place) -> Cursor:
        found = heads.cursors.get((place.pointer, place.index))
        if found is None:
            found = heads.cursors[place.pointer, place.index] = self.nest.cursor(place)
        return found

    def _head_stores(self, heads: Heads, generic: Generic) -> None:
        for number, output in enumerate(generic.outputs):
            key = (generic.number, number)
            for store in output.stores:
                cursor = self.nest.cursor(self.nest.place_of(store))
                heads.stores.append((key, cursor, self.nest.may_stream(generic, store, self.lane_dim)))
            own = Access(Result(*key), output.shape, output.element, output.access_indices)
            if key in self.nest.storage.whole or (key in self.nest.storage.scratch and not output.stores):
                heads.stores.append((key, self.nest.cursor(self.nest.place_of(own)), False))

    def _body(self, heads: Heads, i: Value, lanes: int, values: dict[Key, Value], keys: list[Key]) -> list[Value]:
        """One vector (or one element) of every generic of the step; returns the new accumulators."""
        nest = self.nest
        nest.lane_index, nest.lanes, nest.iota = i, lanes, {}
        loaded: dict[int, Value] = {}
        registers: dict[Key, Value] = {}
        memory: list[tuple[Cursor, Value]] = []
        updated = dict(values)

        def operand(source: Value | Cursor | Key | None) -> Value | None:
            if isinstance(source, Cursor):
                if id(source) not in loaded:
                    loaded[id(source)] = source.read(i, lanes)
                return loaded[id(source)]
            return registers[source] if isinstance(source, tuple) else source

        for generic in self.step.generics:
            nest.dims = generic.dims
            arguments = [operand(source) for source in heads.operands[generic.number]]
            first = len(generic.operands)
            if generic.is_reduction:
                for k in range(len(generic.outputs)):
                    key = (generic.number, k)
                    in_memory = heads.memory.get(key)
                    arguments[first + k] = in_memory.read(i, lanes) if in_memory else values[key]
            results = nest.region(generic, arguments, heads.environments.get(generic.number, {}))
            for k, value in enumerate(results):
                key = (generic.number, k)
                value = ln.splat(value, lanes) if generic.is_reduction else value
                if key in heads.memory:
                    memory.append((heads.memory[key], value))
                elif generic.is_reduction:
                    updated[key] = value
                else:
                    registers[key] = value
        for cursor, value in memory:
            cursor.write(value, i, lanes)
        for key, cursor, streams in heads.stores:
            cursor.write(registers[key], i, lanes, streams and lanes > 0)
        return [updated[key] for key in keys]

    def _prefetch(self, heads: Heads, i: Value) -> None:
        """Asks for the same part of the next row of what the row reads from memory."""
        for place, stride in self.nest.next_row_reads(self.step):
            cursor = heads.cursors.get((place.pointer, place.index))
            if cursor is None or cursor.stride != 1:
                continue
            size = ln.bytes_of(cursor.element)
            for line in range(0, self.lanes * self.unroll * size, 64):
                pointer = cursor.at(i, stride + line // size)
                zero, three, one = (ir.IntegerAttr.get(ln.int_type(32), n) for n in (0, 3, 1))
                ln.create_void("llvm.intr.prefetch", [pointer], {"rw": zero, "hint": three, "cache": one})

    # --- accumulators in memory: their start, and further copies of the result ---

    def _kept_loops(self, accumulator: Accumulator, emit) -> None:
        """`emit(i, lanes)` over the inner dims a reduction keeps, the last one in lanes."""
        nest, generic = self.nest, accumulator.generic
        kept = [d for d in self.inner if d in generic.dims and d not in generic.reduced]

        def loops(level: int) -> None:
            if level < len(kept) - 1:

                def iteration(index: Value, carried: list[Value]) -> list[Value]:
                    nest.coordinates[kept[level]] = index
                    loops(level + 1)
                    return carried

                loop_i64(0, nest.sizes[kept[level]], 1, [], iteration)
                return
            nest.lane_dim, nest.lane_low = kept[-1], 0
            size, lanes = nest.sizes[kept[-1]], nest.full_lanes
            body_of = emit()
            vectors = size // lanes * lanes
            loop_i64(0, vectors, lanes, [], lambda i, c: body_of(i, lanes) or c)
            loop_i64(vectors, size, 1, [], lambda i, c: body_of(i, 0) or c)
            nest.lane_dim = None

        loops(0)

    def _fill(self, accumulator: Accumulator) -> None:
        output, nest, place = accumulator.output, self.nest, accumulator.place
        assert place is not None

        def emit():
            target = nest.cursor(place)
            source = None
            if output.init.access is not None and nest.operand(output.init.access) is None:
                source = nest.cursor(nest.place_of(output.init.access))
            scalar = nest.init_value(output) if source is None else None

            def body_of(i: Value, lanes: int) -> None:
                value = ln.splat(scalar, lanes) if source is None else source.read(i, lanes)
                target.write(value, i, lanes)

            return body_of

        self._kept_loops(accumulator, emit)

    def _copy_out(self, accumulator: Accumulator) -> None:
        """A result that is wanted in more than one place accumulates in the first."""
        nest, output, place = self.nest, accumulator.output, accumulator.place
        assert place is not None
        own = Access(Result(*accumulator.key), output.shape, output.element, output.access_indices)
        targets = [nest.place_of(store) for store in output.stores]
        if accumulator.key in nest.storage.whole:
            targets.append(nest.place_of(own))
        for target in targets:
            if target == place:
                continue

            def emit(target: Place = target):
                source, sink = nest.cursor(place), nest.cursor(target)
                return lambda i, lanes: sink.write(source.read(i, lanes), i, lanes)

            self._kept_loops(accumulator, emit)


def _flatten(carried: dict[Key, Carried]) -> list[Value]:
    return [value for c in carried.values() for value in c.values()]


def _unflatten(like: dict[Key, Carried], values: list[Value]) -> dict[Key, Carried]:
    rest = iter(values)
    return {
        key: Carried(next(rest) if c.vector is not None else None, next(rest) if c.scalar is not None else None)
        for key, c in like.items()
    }
