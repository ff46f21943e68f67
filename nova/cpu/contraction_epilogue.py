"""Evaluates a contraction kernel's epilogue on one row segment, and stores its results.

    acc (lanes of row m, columns n, n+1, ...)  ->  bias, residual, activation, casts ...  ->  every output

Tensors are evaluated on demand, from the outputs backwards, so a generic's place in the function doesn't matter: one
that makes the accumulator's start (a broadcast bias) is the same as one behind it. Per access, the segment is one
vector load, one scalar for all lanes, or a scalar a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nova.cpu import body, ints
from nova.cpu.ints import Int
from nova.errors import CompileError
from nova.fusion import access as ac
from nova.fusion.access import Access
from nova.fusion.contraction_form import Contraction, Generic
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir

# A region with more operations than this is emitted once, in a loop over the tile's rows, not once a register.
LIGHT_OPERATIONS = 6


@dataclass
class Frame:
    """The buffers of one batch element: what stays the same over the whole M x N plane."""

    c: Contraction
    pointers: tuple[Value, ...]
    batch: Int
    bases: dict[Access, Value] = field(default_factory=dict)

    def base(self, access: Access) -> Value:
        """Pointer to the access at m = n = k = 0 of this batch element."""
        return self.bases[access]

    def prepare(self) -> Frame:
        """Emits every base pointer here, so that the loops inside find them ready."""
        for access in dict.fromkeys(self.c.all_accesses()):
            dims = self.c.dims
            offset = ints.add(ints.offset_along(access, dims.batch, dims.sizes, self.batch), access.offset)
            self.bases[access] = ints.offset_pointer(self.pointers[access.buffer], offset, access.element)
        return self


def lane_stride(c: Contraction, access: Access, lanes: int) -> int | None:
    """Elements between neighbouring lanes of a segment, or None where segments cross a break of the access."""
    if not access.touches(c.dims.n):
        return 0
    stride, run = ac.contiguous_run(access, c.dims.n, c.dims.sizes)
    return stride if run >= c.n or (lanes and run % lanes == 0) else None


def all_vector_friendly(c: Contraction, lanes: int) -> bool:
    """Whether every access of the epilogue is one vector or one scalar for a segment of `lanes` columns."""
    accesses = [*c.plane_reads(), *(access for _, access in c.outputs)]
    return all(lane_stride(c, access, lanes) in (0, 1) for access in accesses)


@dataclass
class Anchor:
    """A place (m, n) of the plane and the addresses worked out there; segments stand at constant distances from it."""

    frame: Frame
    m: Int
    n: Int
    pointers: dict[Access, Value] = field(default_factory=dict)

    def address(self, access: Access, dm: int, dn: int) -> Value:
        """Where the access is at (m + dm, n + dn)."""
        c = self.frame.c
        steps = _steps(c, access)
        if steps is None:  # a break of the access may lie in between
            return self._address(access, ints.add(self.m, dm), ints.add(self.n, dn))
        if access not in self.pointers:
            self.pointers[access] = self._address(access, self.m, self.n)
        return ints.offset_pointer(self.pointers[access], dm * steps[0] + dn * steps[1], access.element)

    def _address(self, access: Access, m: Int, n: Int) -> Value:
        dims = self.frame.c.dims
        along_m = ints.offset_along(access, dims.m, dims.sizes, m)
        along_n = ints.offset_along(access, dims.n, dims.sizes, n)
        tile: Int = 0
        if access.coefficients[self.frame.c.tile_dim]:
            tile = ints.mul(ints.div(n, self.frame.c.tile), access.coefficients[self.frame.c.tile_dim])
        return ints.offset_pointer(self.frame.base(access), ints.add(along_m, along_n, tile), access.element)


def _steps(c: Contraction, access: Access) -> tuple[int, int] | None:
    """Elements from m to m + 1 and from n to n + 1, or None where that depends on the place."""
    steps = []
    for dims, extent in ((c.dims.m, c.m), (c.dims.n, c.n)):
        stride, run = ac.contiguous_run(access, dims, c.dims.sizes) if access.touches(dims) else (0, extent)
        if run < extent:
            return None
        steps.append(stride)
    return steps[0], steps[1]


class Segment(body.Hooks):
    """Row m + dm of an anchor, columns n + dn and the following (lanes = 0: that one column, in scalars)."""

    def __init__(self, anchor: Anchor, dm: int, dn: int, lanes: int, accumulator: Value | None = None):
        self.anchor, self.frame, self.c = anchor, anchor.frame, anchor.frame.c
        self.dm, self.dn, self.lanes = dm, dn, lanes
        self.accumulator = accumulator
        self.computed: dict[int, list[Value]] = {}
        self.current: Generic | None = None

    @property
    def m(self) -> Int:
        return ints.add(self.anchor.m, self.dm)

    @property
    def n(self) -> Int:
        return ints.add(self.anchor.n, self.dn)

    def store_outputs(self) -> None:
        for value, access in self.c.outputs:
            self.store(access, self.value(value))

    # --- values of tensors on this segment -----------------------------------------------------------------------

    def value(self, tensor: Value) -> Value:
        generic, result = self.c.generics[tensor]
        if id(generic) not in self.computed:
            if generic.tile:
                raise CompileError(f"kernel @{self.c.name} reads a tile reduction before it is complete: {generic.op}")
            self.computed[id(generic)] = [self._start()] if generic is self.c.core else self._evaluate(generic)
        return self.computed[id(generic)][result]

    def _start(self) -> Value:
        """The accumulator plus what the accumulation starts from."""
        start = self._operand(self.c.core, self.c.core.inputs)
        if start is None:
            return self.accumulator
        start = start if ln.lanes_of(start.type) else ln.splat(start, self.lanes)
        return ln.addf(start, self.accumulator)

    def _evaluate(self, generic: Generic) -> list[Value]:
        numbers = range(len(generic.block.arguments))
        return self._emit(generic, [self._operand(generic, i) if generic.reads(i) else None for i in numbers])

    def reduce(self, generic: Generic, carried: list[Value]) -> list[Value]:
        """One step of a reduction over tiles: the running values after this segment."""
        inputs = [self._operand(generic, i) if generic.reads(i) else None for i in range(generic.inputs)]
        return self._emit(generic, [*inputs, *carried])

    def _emit(self, generic: Generic, operands: list[Value | None]) -> list[Value]:
        outer, self.current = self.current, generic
        values = body.emit_region(generic.block, operands, self)
        self.current = outer
        return values

    def _operand(self, generic: Generic, number: int) -> Value | None:
        """The operand on this segment; None for an accumulator that starts from zero."""
        tensor = generic.operands[number]
        if (generic.op, number) in self.c.accesses:
            return self.load(self.c.accesses[generic.op, number])
        if tensor in self.c.generics:
            _check_same_place(self.c, generic, number)
            return self.value(tensor)
        owner = tensor.owner
        if not isinstance(owner, ir.Block) and owner.name == "linalg.fill":
            constant = owner.operands[0].owner
            if generic is self.c.core and ir.FloatAttr(constant.attributes["value"]).value == 0.0:
                return None
            return self.outer(owner.operands[0])
        raise CompileError(f"kernel @{self.c.name}: operand {number} of {generic.op} is not a kernel argument")

    # --- memory --------------------------------------------------------------------------------------------------

    def address(self, access: Access, lane: int = 0) -> Value:
        return self.anchor.address(access, self.dm, self.dn + lane)

    def load(self, access: Access) -> Value:
        element = ln.register_type(access.element)
        stride = lane_stride(self.c, access, self.lanes)
        if not self.lanes or stride == 0:
            return ln.load(self.address(access), element)
        if stride == 1:
            return ln.load(self.address(access), element, self.lanes)
        return ln.from_lanes([ln.load(self.address(access, i), element) for i in range(self.lanes)])

    def store(self, access: Access, value: Value) -> None:
        if not self.lanes:
            ln.store(value, self.address(access))
            return
        value = ln.splat(value, self.lanes)
        if lane_stride(self.c, access, self.lanes) == 1:
            ln.store(value, self.address(access))
            return
        for i in range(self.lanes):
            ln.store(ln.lane(value, i), self.address(access, i))

    # --- what regions ask for (body.Hooks) -----------------------------------------------------------------------

    def _place(self, dim: int) -> tuple[Int, bool]:
        """Position along a kernel dimension at lane 0, and whether lanes advance it."""
        dims = self.c.dims
        for role, flat in ((dims.m, self.m), (dims.n, self.n), (dims.batch, self.frame.batch)):
            if dim in role:
                at = role.index(dim)
                digit = ints.digits(flat, [dims.sizes[d] for d in role])[at]
                return digit, role is dims.n and at == len(role) - 1
        return 0, False

    def is_uniform_index(self, dim: int) -> bool:
        assert self.current is not None
        return not self.lanes or self.current.dims[dim] not in self.c.dims.n

    def index(self, dim: int) -> Value:
        assert self.current is not None
        kernel_dim = self.current.dims[dim]
        if self.is_uniform_index(dim):
            return ln.cast("index_cast", ints.value(self._place(kernel_dim)[0]), ln.index_type())
        places = []
        for lane in range(self.lanes):
            shifted = Segment(self.anchor, self.dm, self.dn + lane, 0)
            place = ints.value(shifted._place(kernel_dim)[0])
            places.append(ln.cast("index_cast", place, ln.index_type()))
        return ln.from_lanes(places)

    def extract(self, op: ir.Operation, indices: list[Value], env: body.Environment) -> Value:
        position = {argument: i for i, argument in enumerate(_arguments(op))}
        window = ac.view_of(op.operands[0], position)
        if window is None:
            raise CompileError(f"kernel @{self.c.name}: a gather from a tensor that is not an argument: {op}")
        element = ln.register_type(window.element)

        def load(places: list[Value]) -> Value:
            terms = [
                ints.mul(ints.from_index(place), stride) for place, stride in zip(places, window.strides, strict=True)
            ]
            pointer = self.frame.pointers[window.buffer]
            return ln.load(ints.offset_pointer(pointer, ints.add(window.offset, *terms), element), element)

        if not any(ln.lanes_of(i.type) for i in indices):
            return load(indices)
        lanes = [[ln.lane(i, lane) if ln.lanes_of(i.type) else i for i in indices] for lane in range(self.lanes)]
        return ln.from_lanes([load(places) for places in lanes])


def _arguments(op: ir.Operation) -> list[ir.Value]:
    """Arguments of the function an operation is in."""
    while op.name != "func.func":
        op = op.parent.operation if hasattr(op.parent, "operation") else op.parent
    return list(op.regions[0].blocks[0].arguments)


def _check_same_place(c: Contraction, consumer: Generic, number: int) -> None:
    """A value made in this kernel must be read where it was made: at the same m and n."""
    producer, result = c.generics[consumer.operands[number]]
    made = _places(producer, producer.inputs + result)
    read = _places(consumer, number)
    if made != read:
        raise CompileError(f"kernel @{c.name}: an epilogue reads a value of the kernel at another place: {consumer.op}")


def _places(generic: Generic, number: int) -> list[tuple[tuple[int, int], ...]]:
    found = []
    for expression in generic.maps[number].results:
        form, _ = ac.linear_form(expression, len(generic.dims))
        ids = [*generic.dims, -1]
        found.append(tuple(sorted((ids[i], factor) for i, factor in enumerate(form) if factor)))
    return found


def emit_row(frame: Frame, m: Int, n: Int, count: Int, load: Callable[[Int, int], Value], lanes: int) -> None:
    """The epilogue on columns [n, n + count) of row m: whole vectors, then single columns.

    `load(j, lanes)` gives the accumulators of columns n + j and following (lanes = 0: of one column).
    """
    whole = ints.mul(ints.div(count, lanes), lanes)
    with ints.loop(0, whole, lanes) as j:
        Segment(Anchor(frame, m, ints.add(n, j)), 0, 0, lanes, load(j, lanes)).store_outputs()
    if not (isinstance(count, int) and count == whole):
        with ints.loop(whole, count) as j:
            Segment(Anchor(frame, m, ints.add(n, j)), 0, 0, 0, load(j, 0)).store_outputs()
