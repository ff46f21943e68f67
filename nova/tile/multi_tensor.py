"""Kernels of kind "multi_tensor": one update of many tensors (optimizers, norms), in code that knows neither how many
there are nor their shapes.

A launch has one argument: a table of 64-bit words in device memory.

    n, int64 numel[n], lists flattened (list 0's n pointers, list 1's, ...), shared operands,
    result lists flattened, other results, workspace, error record

    prepare     block 0: the first unit of each tensor (a unit is what a block moves at once); the other blocks: the
                scalars of the tensors - bias corrections in f64, step counts in place - once each, not once a block
    elements    each block a contiguous share of all units, tensor by tensor; 16-byte accesses where all pointers of a
                tensor are aligned. A reduction leaves a partial for each (tensor, block) that meet, slot tensor + block
    join        the partials of each tensor, in order; then the scalars that depend on them
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from nova.errors import CompileError
from nova.fusion import readback
from nova.fusion.kernel import Expr, Index, Kernel, Out, Structured, Tensor, expr, load, rewrite, walk
from nova.mlir import ir
from nova.schedule.target import GpuTarget
from nova.tile.builder import Program
from nova.tile.combine import identity
from nova.tile.expressions import Domain, Evaluator, Part, Sources, memory_element
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import BITS, Operand, Value

TENSORS = 1 << 15  # at most, in one call
THREADS = 256
BLOCKS_PER_SM = 16  # of the elements' launch
HEAD = 2  # words before the pointers: n, numel
RAGGED = 2  # elements of a thread where a unit is not whole or not aligned
IN_FLIGHT = 128  # bytes a thread loads before it uses any


def generate(func_op: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launches of a kernel, and its workspace in bytes."""
    plan = _Plan(readback.read(func_op), target)
    programs = [_prepare(plan)]
    if plan.elements:
        programs.append(_elements(plan))
    if plan.late:
        programs.append(_join(plan))
    return programs, plan.workspace


@dataclass
class _Slot:
    """An array in the workspace."""

    offset: int
    element: str


@dataclass
class _Plan:
    """What each launch computes. Tensors of the "saved" kind are scalars that `prepare` leaves for the others."""

    kernel: Kernel
    target: GpuTarget
    words: dict[Tensor, tuple[int, int]] = field(default_factory=dict)  # (fixed part, lists before it)
    end: tuple[int, int] = (0, 0)  # the workspace's word
    early: list[Out] = field(default_factory=list)
    elements: list[Structured] = field(default_factory=list)
    late: list[Out] = field(default_factory=list)
    slots: dict[Tensor, _Slot] = field(default_factory=dict)  # saved scalars and partials
    partials: dict[Tensor, Out] = field(default_factory=dict)
    definitions: dict[Tensor, Expr] = field(default_factory=dict)  # of locals and saved scalars
    workspace: int = 0

    def __post_init__(self) -> None:
        self._place_words()
        self.firsts = self._reserve(TENSORS + 1, "i32")
        late = self._late_tensors()
        for op in self.kernel.ops:
            if op.checks:
                raise CompileError(f"kernel @{self.kernel.name}: a check in an update of many tensors")
            if op.loops:
                self._element_op(op, late)
            else:
                self._scalar_op(op, late)

    @property
    def grid(self) -> int:
        return self.target.sms * BLOCKS_PER_SM

    def _place_words(self) -> None:
        fixed, lists = HEAD, 0
        for group in (self.kernel.args, self.kernel.outs):
            for tensor in group:
                if tensor.list_ == "nova.list":
                    self.words[tensor] = (fixed, lists)
                    lists += 1
            for tensor in group:
                if tensor.list_ != "nova.list":
                    self.words[tensor] = (fixed, lists)
                    fixed += 1
        self.end = (fixed, lists)

    def _reserve(self, count: int, element: str) -> _Slot:
        slot = _Slot(self.workspace, element)
        self.workspace += -(-count * max(BITS[element], 8) // 8 // 256) * 256
        return slot

    def _late_tensors(self) -> set[Tensor]:
        """Scalars that depend on a reduction over their tensor."""
        found: set[Tensor] = set()
        for op in self.kernel.ops:
            for out in op.outs:
                if out.combine is not None or (
                    not op.loops and any(n.op == "load" and n.attr[0] in found for n in walk([out.value]))
                ):
                    found.add(out.tensor)
        return found

    def _element_op(self, op: Structured, late: set[Tensor]) -> None:
        outs = [Out(o.tensor, o.index, self._saving(o.value, late), o.combine, o.init) for o in op.outs]
        self.elements.append(Structured(op.loops, op.reduced, outs))
        for out in outs:
            if _reads(out.value, late):
                raise CompileError(f"kernel @{self.kernel.name}: an update uses a reduction of its own tensor")
            if out.combine is None:
                continue
            self.partials[out.tensor] = out
            self.slots[out.tensor] = self._reserve(TENSORS + self.grid, memory_element(out.tensor.dtype))
            if out.tensor.kind == "out":
                self.late.append(Out(out.tensor, (), load(out.tensor, ())))

    def _scalar_op(self, op: Structured, late: set[Tensor]) -> None:
        for out in op.outs:
            if out.tensor not in late:
                self.early.append(out)
                self.definitions[out.tensor] = out.value
                continue
            value = self._saving(out.value, late)
            self.definitions[out.tensor] = value
            if out.tensor.kind == "out":
                self.late.append(Out(out.tensor, out.index, value))

    def _saving(self, root: Expr, late: set[Tensor]) -> Expr:
        """The expression with all that is known before the elements replaced by loads of saved scalars."""
        known: dict[Expr, bool] = {}
        for node in walk([root]):
            own = node.op not in ("linear", "acc", "nova.philox")
            if node.op == "load":
                own = not node.attr[0].shape and node.attr[0] not in late and not self._is_element(node.attr[0])
            known[node] = own and all(known[arg] for arg in node.args)
        memo: dict[Expr, Expr] = {}

        def replaced(node: Expr) -> Expr:
            if node.op == "const" or not known[node]:
                return memo[node]
            return self._saved(node)

        for node in walk([root]):
            if known[node]:
                memo[node] = node
                continue
            memo[node] = expr(node.op, [replaced(arg) for arg in node.args], node.type, node.attr)
        return replaced(root)

    def _is_element(self, tensor: Tensor) -> bool:
        """A local that another op over the elements computes."""
        return any(out.tensor is tensor for op in self.elements for out in op.outs)

    def _saved(self, value: Expr) -> Expr:
        for tensor, definition in self.definitions.items():
            if tensor.kind == "saved" and definition is value:
                return load(tensor, ())
        tensor = Tensor("saved", (), value.type)
        self.definitions[tensor] = value
        self.slots[tensor] = self._reserve(TENSORS, memory_element(value.type))
        self.early.append(Out(tensor, (), value))
        return load(tensor, ())


def _reads(root: Expr, tensors: set[Tensor]) -> bool:
    return any(node.op == "load" and node.attr[0] in tensors for node in walk([root]))


# --- what the launches share ------------------------------------------------------------------------------------------


class _Launch:
    """A program with the table's fixed words read."""

    def __init__(self, plan: _Plan, name: str, grid: int, threads: int, min_blocks: int = 0):
        self.plan = plan
        self.program = p = Program(f"{plan.kernel.name}_{name}", 1, (grid, 1, 1), threads, min_blocks)
        self.table = p.args[0]
        self.n = p.load_scalar(self.table, 0, "i64")
        self.count = p.cast(self.n, "i32")
        self.workspace = p.load_pointer(self.table, self.word(plan.end))
        self.firsts = self.slot(plan.firsts)
        self.shared: dict[Tensor, Value] = {}

    def word(self, place: tuple[int, int], tensor: Operand | None = None) -> Operand:
        """The number of a word: fixed + lists * n + tensor."""
        fixed, lists = place
        p = self.program
        found = p.add(p.mul(self.n, lists), fixed)
        return found if tensor is None else p.add(p.cast(tensor, "i64"), found)

    def slot(self, slot: _Slot) -> Value:
        return self.program.advance(self.workspace, slot.offset, "i8") if slot.offset else self.workspace

    def pointer(self, tensor: Tensor, number: Operand) -> Value:
        """Of a list's entry, or of what all tensors share."""
        place = self.plan.words[tensor]
        return self.program.load_pointer(self.table, self.word(place, number if tensor.list_ == "nova.list" else None))

    def first(self, tensor: Operand) -> Value:
        """The number of the tensor's first unit."""
        return self.program.load_scalar(self.firsts, self.program.cast(tensor, "i64"), "i32")


class _Scalars(Sources):
    """Scalars of tensor `number`."""

    def __init__(self, launch: _Launch, number: Operand):
        self.launch, self.number = launch, number
        self.known: dict[Tensor, Part] = {}

    def load(self, tensor: Tensor, index: Index) -> Part:
        if tensor not in self.known:
            self.known[tensor] = self.read(tensor)
        return self.known[tensor]

    def read(self, tensor: Tensor) -> Part:
        launch, p = self.launch, self.launch.program
        element = memory_element(tensor.dtype)
        if tensor in launch.plan.slots and tensor.kind == "saved":
            slot = launch.slot(launch.plan.slots[tensor])
            return Part(p.load_scalar(slot, p.cast(self.number, "i64"), element), (), element)
        if tensor.kind == "local":
            raise CompileError(f"kernel @{launch.plan.kernel.name}: {tensor} is read before it is written")
        return Part(p.load_scalar(launch.pointer(tensor, self.number), 0, element), (), element)


_NOTHING = NestedLayout((), (), (), (), (), (), ())


def _store_scalars(launch: _Launch, scalars: _Scalars, outs: list[Out]) -> None:
    """Computes all, then stores: what is updated in place is read before."""
    domain = Domain(launch.program, _NOTHING)
    evaluator = Evaluator(domain, scalars)
    values = []
    for out in outs:
        (part,) = evaluator.emit([out.value])
        if out.tensor not in scalars.known:
            scalars.known[out.tensor] = part
        values.append(domain.scalar(part))
    p = launch.program
    for out, value in zip(outs, values, strict=True):
        if out.tensor.kind == "saved":
            p.store_scalar(value, launch.slot(launch.plan.slots[out.tensor]), p.cast(scalars.number, "i64"))
        elif out.tensor.kind == "out":
            at = p.cast(scalars.number, "i64") if out.tensor.list_ == "nova.element" else 0
            p.store_scalar(value, launch.pointer(out.tensor, scalars.number), at)


# --- prepare ----------------------------------------------------------------------------------------------------------


def _prepare(plan: _Plan) -> Program:
    """Block 0 counts units, the others compute scalars."""
    workers = plan.target.sms if plan.early else 0
    launch = _Launch(plan, "prepare", 1 + workers, 128)
    p = launch.program
    block = p.program_id(0)
    with p.if_(p.compare("eq", block, 0)):
        _count_units(launch, _unit(plan)[0])
    if workers:
        with p.if_(p.compare("ne", block, 0)), p.for_(p.sub(block, 1), launch.count, workers) as loop:
            _store_scalars(launch, _Scalars(launch, loop.index), plan.early)
    return p


def _count_units(launch: _Launch, unit: int) -> None:
    """firsts[t + 1] = the units of tensors 0 .. t."""
    p, threads = launch.program, launch.program.threads
    numel = p.load_pointer(launch.table, 1)
    layout = blocked([threads], [threads // 32], [32])
    p.store_scalar(p.scalar(0), launch.firsts, 0)
    with p.for_(0, launch.count, threads, [p.scalar(0)]) as loop:
        place = p.binary("arith.addi", p.iota(0, layout), loop.index)
        inside = p.cmp("slt", place, launch.count)
        sizes = p.gather(numel, place, "i64", inside)
        units = p.convert(p.binary("arith.divui", p.binary("arith.addi", sizes, unit - 1), unit), "i32")
        ends = p.binary("arith.addi", p.scan(units, 0, "addi"), loop.carried[0])
        p.scatter(ends, launch.firsts, p.binary("arith.addi", place, 1), inside)
        loop.yield_([p.int_op("addi", loop.carried[0], p.reduce(units, [0], "addi"))])


# --- elements ---------------------------------------------------------------------------------------------------------


def _streams(plan: _Plan) -> list[Tensor]:
    """Tensors of the elements: those read, then those written."""
    read = {t: None for op in plan.elements for t, _ in op.loads() if t.shape and t.kind != "local"}
    written = {o.tensor: None for op in plan.elements for o in op.outs if o.tensor.kind == "out" and o.combine is None}
    return [*read, *written]


def _unit(plan: _Plan) -> tuple[int, NestedLayout]:
    """(elements a block moves at once, how its threads hold them)."""
    reads = {t for op in plan.elements for t, _ in op.loads() if t.shape and t.kind != "local"}
    sizes = [BITS[memory_element(t.dtype)] // 8 for t in _streams(plan)] or [4]
    run = min(8, 16 // min(sizes))
    bytes_ = run * sum(BITS[memory_element(t.dtype)] // 8 for t in reads)
    batch = max(1, IN_FLIGHT // max(bytes_, 16))
    unit = THREADS * run * batch
    return unit, blocked([unit], [THREADS // 32], [32], run)


def _blocks_per_sm(plan: _Plan) -> int:
    """So many that ptxas keeps the registers for them: three blocks where few pointers and no doubles are live."""
    streams = _streams(plan)
    small = all(BITS[memory_element(t.dtype)] <= 32 for t in streams)
    return 3 if small and len(streams) <= 7 else 2


class _Elements(_Scalars):
    """Elements of one tensor beside its scalars: `at` is a unit's start, `mask` its part inside the tensor."""

    def __init__(self, launch: _Launch, number: Operand, layout: NestedLayout):
        super().__init__(launch, number)
        self.layout, self.domain = layout, Domain(launch.program, layout)
        self.pointers = {tensor: launch.pointer(tensor, number) for tensor in _streams(launch.plan)}
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


def _elements(plan: _Plan) -> Program:
    launch = _Launch(plan, "elements", plan.grid, THREADS, _blocks_per_sm(plan))
    p = launch.program
    unit, layout = _unit(plan)
    block = p.program_id(0)
    begin, end = _span(launch, block)
    with p.if_(p.compare("slt", begin, end)):
        last = p.add(_search(launch, p.sub(end, 1)), 1)
        with p.for_(_search(launch, begin), last, 1) as loop:
            _tensor(launch, loop.index, block, (begin, end), unit, layout)
    return p


def _span(launch: _Launch, block: Operand) -> tuple[Operand, Operand]:
    """A block's share of the units."""
    p = launch.program
    begin = p.mul(block, _share(launch))
    units = launch.first(launch.count)
    begin = p.min(begin, units)
    return begin, p.min(p.add(begin, _share(launch)), units)


def _share(launch: _Launch) -> Operand:
    """Units of a block."""
    return launch.program.cdiv(launch.first(launch.count), launch.plan.grid)


def _search(launch: _Launch, unit: Operand) -> Value:
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
    launch: _Launch, number: Operand, block: Operand, span: tuple[Operand, Operand], unit: int, layout: NestedLayout
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
        joined = [p.reduce(part, [0], str(out.combine).split(".")[1]) for part in parts]
        p.store_scalar(p.binary(str(out.combine), *joined), launch.slot(plan.slots[tensor]), place)


def _starts(plan: _Plan, source: _Elements) -> list[Value]:
    domain = source.domain
    return [domain.whole(Part(_start(out), (), memory_element(t.dtype))) for t, out in plan.partials.items()]


def _start(out: Out) -> float | int:
    return identity(str(out.combine), out.tensor.dtype)


def _preload(plan: _Plan, source: _Elements) -> None:
    """Scalars that the elements use, before the loops over them."""
    for op in plan.elements:
        for tensor, index in op.loads():
            if tensor.kind == "saved":
                source.load(tensor, index)


def _aligned(launch: _Launch, source: _Elements) -> Value:
    """Whether all pointers allow 16-byte accesses."""
    p = launch.program
    bits: Operand = 0
    for pointer in source.pointers.values():
        address = p.address(pointer)
        bits = address if isinstance(bits, int) else p.int_op("ori", bits, address)
    return p.compare("eq", p.int_op("andi", p.scalar(bits, "i64"), 15), 0)


def _update(plan: _Plan, source: _Elements, carried: list[Value]) -> list[Value]:
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
        value = p.select(source.inside[1], value, _start(out))
    return p.binary(str(out.combine), total, value)


# --- join -------------------------------------------------------------------------------------------------------------


def _join(plan: _Plan) -> Program:
    launch = _Launch(plan, "join", plan.target.sms, 128)
    p = launch.program
    share = p.max(_share(launch), 1)
    with p.for_(p.program_id(0), launch.count, plan.target.sms) as loop:
        scalars = _Scalars(launch, loop.index)
        begin, end = launch.first(loop.index), launch.first(p.add(loop.index, 1))
        first = p.div(begin, share)
        # a tensor without elements meets no block
        last = p.select(p.compare("eq", begin, end), first, p.add(p.div(p.sub(end, 1), share), 1))
        for tensor, out in plan.partials.items():
            scalars.known[tensor] = _joined(launch, loop.index, tensor, out, first, last)
        late = [Out(o.tensor, o.index, _inlined(plan, o.value)) for o in plan.late]
        _store_scalars(launch, scalars, late)
    return p


def _inlined(plan: _Plan, root: Expr) -> Expr:
    """With late locals replaced by their definitions."""

    def change(node: Expr) -> Expr | None:
        if node.op == "load" and node.attr[0].kind == "local" and node.attr[0] in plan.definitions:
            return _inlined(plan, plan.definitions[node.attr[0]])
        return None

    return rewrite(root, change)


def _joined(launch: _Launch, number: Operand, tensor: Tensor, out: Out, first: Operand, last: Operand) -> Part:
    """The whole reduction of one tensor, in order of the blocks; sums of f32 in f64."""
    p = launch.program
    element, kind = memory_element(tensor.dtype), str(out.combine).split(".")[1]
    wide = "f64" if (element, kind) == ("f32", "addf") else element
    layout = blocked([p.threads], [p.threads // 32], [32])
    slots = p.advance(launch.slot(launch.plan.slots[tensor]), p.cast(number, "i64"), element)
    with p.for_(first, last, p.threads, [p.scalar(out.init, wide)]) as loop:
        place = p.binary("arith.addi", p.iota(0, layout), loop.index)
        inside = p.cmp("slt", place, last)
        parts = p.gather(slots, place, element, inside, fill=_start(out))
        total = p.reduce(p.convert(parts, wide), [0], kind)
        loop.yield_([p.binary(str(out.combine), loop.carried[0], total)])
    return Part(p.convert(loop.results[0], element), (), element)
