"""Emits one nest (see loops_plan): its rows, and the code that runs once a row.

for row in my rows:                    scf.for; the coordinates are carried along, no divisions
  step 0: a loop over lanes            loops_step
  step 1: scalar code                  values stay in registers for the steps after it
"""

from __future__ import annotations

from collections.abc import Sequence

from nova.cpu import body
from nova.cpu.loops_ir import Access, Argument, Generic, Index, Kernel, Output, Result
from nova.cpu.loops_plan import Nest, Step, local_index
from nova.cpu.loops_step import StepEmitter
from nova.cpu.loops_tile import emit_tile
from nova.cpu.loops_values import Cursor, Key, Place, add, loop_i64, mul, value_of
from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf


class Storage:
    """Finds the memory of arguments, of per-row scratch, of partials and of whole intermediate results."""

    def __init__(self, arguments: Sequence[Value]):
        self.arguments = list(arguments)
        self.scratch: dict[Key, Value] = {}  # this thread's, one row at a time
        self.whole: dict[Key, Value] = {}  # complete results in the workspace, for later nests
        self.partials: dict[Key, Value] = {}  # this task's partial
        self.tiles: dict[Access, Value] = {}  # this thread's, for operands that are turned over


class NestEmitter(body.Hooks):
    """Emits one nest at the insertion point. Also the hooks that regions of its generics see."""

    def __init__(self, kernel: Kernel, nest: Nest, storage: Storage, lanes: int, error: Value | None):
        self.kernel, self.nest, self.storage, self.error = kernel, nest, storage, error
        self.full_lanes = lanes
        self.streams = False  # nontemporal stores
        self.turned: dict[Access, Place] = {}  # operands read from a tile instead
        self.spans: dict[int, tuple[Value, Value]] = {}  # loops of run-time bounds: dim -> (low, length)
        self.stores_rows = True  # whether code per row writes its results to the caller's buffers
        self.sizes = kernel.sizes
        self.row_dims = nest.row_dims()
        self.coordinates: dict[int, Value | int] = {}
        self.row_values: dict[Key, Value] = {}
        self.by_number = {g.number: g for g in nest.generics}
        self.step_of: dict[int, Step] = {g.number: s for s in nest.steps for g in s.generics}
        # state of the lane loop being emitted
        self.step: Step | None = None
        self.lane_dim: int | None = None
        self.lane_low: Value | int = 0
        self.lane_index: Value | None = None
        self.lanes = 0
        self.dims: tuple[int, ...] = ()
        self.iota: dict[Value, Value] = {}  # index vectors that count up from a scalar

    # --- rows ---

    def emit_rows(self, begin: Value | int, end: Value | int) -> None:
        """All rows begin..end of the flattened row space."""
        rows = self.nest.rows
        if not rows or all(extent == 1 for _, extent in rows):
            self.coordinates.update({dim: 0 for dim, _ in rows})
            if rows and not isinstance(end, int):
                op = scf.IfOp(ln.cmpi("slt", value_of(begin), end))
                with ir.InsertionPoint(op.then_block):
                    self._emit_row()
                    scf.YieldOp([])
            else:
                self._emit_row()
            return
        long = [(dim, extent) for dim, extent in rows if extent != 1]
        self.coordinates.update({dim: 0 for dim, extent in rows if extent == 1})
        if len(long) == 1:

            def row(index: Value, carried: list[Value]) -> list[Value]:
                self.coordinates[long[0][0]] = index
                self._emit_row()
                return carried

            loop_i64(begin, end, 1, [], row)
            return
        rest, starts = value_of(begin), []
        for _, extent in reversed(long[1:]):
            starts.append(ln.remui(rest, ln.i64(extent)))
            rest = ln.divui(rest, ln.i64(extent))
        starts = [rest, *reversed(starts)]

        def row_of_many(index: Value, carried: list[Value]) -> list[Value]:
            for (dim, _), coordinate in zip(long, carried, strict=True):
                self.coordinates[dim] = coordinate
            self._emit_row()
            return self._next_row(long, carried)

        loop_i64(begin, end, 1, starts, row_of_many)

    @staticmethod
    def _next_row(rows: list[tuple[int, int]], carried: list[Value]) -> list[Value]:
        """Coordinates of the next row, like an odometer: a division a row would cost more than a short row."""
        result: list[Value] = []
        one, zero = ln.i64(1), ln.i64(0)
        carry: Value | None = None
        for (_, extent), coordinate in zip(reversed(rows), reversed(carried), strict=True):
            stepped = ln.addi(coordinate, one)
            if carry is not None:
                stepped = ln.select(carry, stepped, coordinate)
            wrapped = ln.cmpi("eq", stepped, ln.i64(extent))
            result.append(ln.select(wrapped, zero, stepped))
            carry = wrapped
        return list(reversed(result))

    def _emit_row(self) -> None:
        self.row_values = {}
        if self.nest.tile:
            emit_tile(self)
            return
        for step in self.nest.steps:
            self.step = step
            self.emit_step(step)

    def emit_step(self, step: Step) -> None:
        if step.inner:
            StepEmitter(self, step).emit()
        else:
            self._emit_row_step(step)

    # --- memory ---

    def offset(self, index: Index, skip: int | None = None) -> Value | int:
        """The offset of an affine index at the current coordinates, without dim `skip`'s term."""
        total: Value | int = index.constant
        for dim, coefficient in index.terms:
            if dim != skip:
                coordinate = self.coordinates[dim]
                total = add(total, mul(coordinate, coefficient))
        return total

    def place_of(self, access: Access) -> Place:
        """The memory behind an access to an argument or to a stored result."""
        if access in self.turned:
            return self.turned[access]
        source = access.source
        if isinstance(source, Argument):
            return Place(self.storage.arguments[source.position], access.linear(), access.element)
        key = (source.generic, source.number)
        if key in self.storage.whole:
            return Place(self.storage.whole[key], access.linear(), access.element)
        producer = self.kernel.generics[source.generic].outputs[source.number]
        if producer.stores:  # read it back from where the caller gets it
            return self._through(producer.stores[0], access, producer)
        if key in self.storage.scratch:
            index = local_index(access, self.row_dims, self.sizes, producer)
            return Place(self.storage.scratch[key], index, access.element)
        raise CompileError(f"result {source.number} of generic {source.generic} is in no memory")

    def _through(self, store: Access, access: Access, producer: Output) -> Place:
        """`access` to a result, as an access to the buffer it was stored in."""
        replaced = {own.plain_dim(): index for own, index in zip(producer.access_indices, access.indices, strict=True)}
        linear = store.linear()
        constant = linear.constant
        terms: dict[int, int] = {}
        for dim, coefficient in linear.terms:
            index = replaced[dim]
            constant += index.constant * coefficient
            for inner, factor in index.terms:
                terms[inner] = terms.get(inner, 0) + factor * coefficient
        assert isinstance(store.source, Argument)
        return Place(self.storage.arguments[store.source.position], Index.of(constant, terms), access.element)

    def cursor(self, place: Place) -> Cursor:
        """At the head of the lane loop: everything but its own term."""
        stride = 0 if self.lane_dim is None else dict(place.index.terms).get(self.lane_dim, 0)
        offset = add(self.offset(place.index, skip=self.lane_dim), mul(self.lane_low, stride))
        pointer = ln.address(place.pointer, value_of(offset), place.element)
        return Cursor(pointer, stride, place.element)

    def load_scalar(self, place: Place) -> Value:
        return ln.load(ln.address(place.pointer, value_of(self.offset(place.index)), place.element), place.element)

    def store_scalar(self, value: Value, place: Place) -> None:
        ln.store(value, ln.address(place.pointer, value_of(self.offset(place.index)), place.element))

    # --- streaming ---

    def may_stream(self, generic: Generic, store: Access, lane_dim: int) -> bool:
        """Whether stores of whole vectors to `store` are aligned (given an aligned buffer) and not read back."""
        if not self.streams or generic.consumers:
            return False
        index = store.linear()
        aligned = all(c % self.full_lanes == 0 for d, c in index.terms if d != lane_dim)
        return aligned and index.constant % self.full_lanes == 0 and dict(index.terms).get(lane_dim) == 1

    def next_row_reads(self, step: Step) -> list[tuple[Place, int]]:
        """(place, elements to the next row) of what `step` is the first of the row to read."""
        rows = [dim for dim, extent in self.nest.rows if extent > 1]
        seen = {a for s in self.nest.steps[: self.nest.steps.index(step)] for g in s.generics for a in g.inputs}
        reads = []
        for access in dict.fromkeys(a for g in step.generics for a in g.inputs):
            if rows and access not in seen and isinstance(access.source, Argument):
                stride = dict(access.linear().terms).get(rows[-1], 0)
                if stride:
                    reads.append((self.place_of(access), stride))
        return reads

    # --- hooks of regions ---

    def index(self, dim: int) -> Value:
        kernel_dim = self.dims[dim]
        if kernel_dim != self.lane_dim:
            return ln.cast("index_cast", value_of(self.coordinates[kernel_dim]), ln.index_type())
        scalar = value_of(add(self.lane_low, self.lane_index))
        if not self.lanes:
            return ln.cast("index_cast", scalar, ln.index_type())
        counting = ln.addi(ln.splat(scalar, self.lanes), ln.iota(ln.int_type(64), self.lanes))
        value = ln.cast("index_cast", counting, ln.index_type())
        self.iota[value] = scalar
        return value

    def is_uniform_index(self, dim: int) -> bool:
        return self.dims[dim] != self.lane_dim

    def extract(self, op: ir.Operation, indices: list[Value], env: body.Environment) -> Value:
        view = self.kernel.views[op.operands[0]]
        access = view.access([Index(0)] * len(view.axes))
        place = self.place_of(access)
        strides = [1] * len(view.shape)
        for axis in range(len(view.shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * view.shape[axis + 1]
        lanes = max((ln.lanes_of(i.type) for i in indices), default=0)
        counting = [k for k, i in enumerate(indices) if i in self.iota]
        vectors = [k for k, i in enumerate(indices) if ln.lanes_of(i.type)]
        if vectors == counting and len(counting) == 1:
            k = counting[0]
            axis, multiplier = view.axes[k]
            indices = [self.iota[i] if j == k else i for j, i in enumerate(indices)]
            offset = self._gather_offset(place, indices, view.axes, strides, 0)
            pointer = ln.address(place.pointer, offset, view.element)
            return Cursor(pointer, strides[axis] * multiplier, view.element).read(ln.i64(0), lanes)
        offset = self._gather_offset(place, indices, view.axes, strides, lanes)
        if not lanes:
            return ln.load(ln.address(place.pointer, offset, view.element), view.element)
        pointers = [ln.address(place.pointer, ln.lane(offset, k), view.element) for k in range(lanes)]
        value = ln.from_lanes([ln.load_raw(p, ln.memory_type(view.element)) for p in pointers])
        if view.element == ln.int_type(1):
            value = ln.cmpi("ne", value, ln.constant(value.type, 0))
        return value

    @staticmethod
    def _gather_offset(
        place: Place, indices: list[Value], axes: Sequence[tuple[int, int]], strides: list[int], lanes: int
    ) -> Value:
        total: Value | None = ln.constant(ln.vector_type(ln.int_type(64), lanes), place.index.constant)
        for value, (axis, multiplier) in zip(indices, axes, strict=True):
            if ln.element_of(value.type) == ln.index_type():
                value = ln.cast("index_cast", value, ln.int_type(64))
            value = ln.splat(value, lanes)
            factor = strides[axis] * multiplier
            if factor != 1:
                value = ln.muli(value, ln.constant(value.type, factor))
            total = ln.addi(total, value)
        return total

    def check(self, bad: Value, value: Value) -> None:
        """nova.check: any bad lane stores its value and raises the flag."""
        if self.error is None:
            raise CompileError(f"kernel @{self.kernel.name} checks values but has no nova.raises")
        lanes = max(ln.lanes_of(bad.type), ln.lanes_of(value.type))
        bad, value = ln.splat(bad, lanes), ln.splat(value, lanes)
        pairs = [(ln.lane(bad, k), ln.lane(value, k)) for k in range(lanes)] if lanes else [(bad, value)]
        for flag, number in pairs:
            op = scf.IfOp(flag)
            with ir.InsertionPoint(op.then_block):
                ln.store(number, ln.address(self.error, ln.i64(1), ln.int_type(64)))
                ln.store(ln.i64(1), self.error)
                scf.YieldOp([])

    # --- code per row ---

    def operand(self, access: Access) -> Value | None:
        """The value of an operand that lanes don't enter and that is in a register already."""
        if isinstance(access.source, Result):
            return self.row_values.get((access.source.generic, access.source.number))
        return None

    def _emit_row_step(self, step: Step) -> None:
        self.lane_dim, self.lanes, self.lane_low, self.lane_index = None, 0, 0, None
        for generic in step.generics:
            self.dims = generic.dims
            values = []
            for access in generic.operands:
                value = self.operand(access) if access is not None else None
                if value is None and access is not None:
                    value = self.load_scalar(self.place_of(access))
                values.append(value)
            for number, output in enumerate(generic.outputs):
                values.append(self._row_init(generic, number, output))
            results = self.region(generic, values, {})
            for number, (output, value) in enumerate(zip(generic.outputs, results, strict=True)):
                key = (generic.number, number)
                if key in self.storage.partials:
                    self.store_scalar(value, Place(self.storage.partials[key], Index(), output.element))
                    continue
                self.finish_row_value(key, output, value)

    def finish_row_value(self, key: Key, output: Output, value: Value) -> None:
        """A value of this row is complete: the steps after use it from a register."""
        self.row_values[key] = value
        for store in output.stores if self.stores_rows else ():
            self.store_scalar(value, self.place_of(store))
        if key in self.storage.whole:
            whole = Access(Result(*key), output.shape, output.element, output.access_indices)
            self.store_scalar(value, self.place_of(whole))

    def _row_init(self, generic: Generic, number: int, output: Output) -> Value | None:
        key = (generic.number, number)
        if key in self.storage.partials:
            return ln.load(self.storage.partials[key], output.element)
        if not output.reads_init:
            return None
        return self.init_value(output)

    def init_value(self, output: Output) -> Value:
        """What a result holds before, at the current coordinates."""
        if output.init.number is not None:
            return ln.create("arith.constant", output.element, [], {"value": output.init.number})
        if output.init.access is None:
            return ln.constant(output.element, 0)
        value = self.operand(output.init.access)
        return self.load_scalar(self.place_of(output.init.access)) if value is None else value

    def region(self, generic: Generic, values: list[Value | None], env: body.Environment) -> list[Value]:
        if generic.block is None:
            return [ln.create("arith.constant", generic.outputs[0].element, [], {"value": generic.constant})]
        return body.emit_region(generic.block, values, self, env)
