"""Kernels of kind "multi_tensor": one update of many tensors (optimizers, norms), in code that knows neither how many
there are nor their shapes.

The function describes ONE tensor of dynamic size: generics with dims = [0] run over its elements, those with dims = []
are scalars of the tensor (bias corrections, the step count). Arguments marked `nova.list` have a pointer a tensor.

    args: n, int64 numel[n], lists flattened (list 0's n pointers, list 1's, ...), shared operands,
          result lists flattened, other results, workspace, error record

All tensors together are cut into chunks of CHUNK elements, dealt to threads: one large embedding does not hold up the
rest. Phase 1 runs over the elements; what a tensor's scalars store (step counts in place!) and whole-tensor reductions
wait for phase 2. A reduction keeps a partial for each (tensor, chunk) that meet, slot tensor + chunk, joined in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from nova.cpu import body, build, parallel
from nova.cpu.loops_emit import NestEmitter, Storage
from nova.cpu.loops_ir import Generic, Kernel, Result, read_kernel
from nova.cpu.loops_plan import Nest, schedule_steps
from nova.cpu.loops_values import Cursor, Key, identity, is_identity, loop_i64
from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf
from nova.schedule.target import CpuTarget

CHUNK = 16384  # elements; grows by a factor from 2^29 elements on, so that the slots suffice
SLOTS = 1 << 16
HEAD = 2  # args[0] = n, args[1] = numel


def lower(func_op: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    """The kernel's module and its workspace in bytes."""
    kernel = read_kernel(func_op)
    marks = [{item.name for item in ir.DictAttr(d)} for d in ir.ArrayAttr(func_op.operation.attributes["arg_attrs"])]
    table = _Table(kernel, marks)
    reductions = [(g, k) for g in kernel.generics if g.is_reduction for k in range(len(g.outputs))]
    workspace = parallel.Workspace()
    slots = {(g.number, k): workspace.shared([SLOTS], ln.memory_type(g.outputs[k].element)) for g, k in reductions}
    phases = []
    if any(g.dims for g in kernel.generics):
        phases.append(parallel.Phase(_tasks, target.cores, lambda r: _emit_elements(kernel, table, slots, r, target)))
    if any(_stores_scalars(g) for g in kernel.generics):
        phases.append(parallel.Phase(1, 1, lambda r: _emit_scalars(kernel, table, slots, r, target)))
    return parallel.emit_kernel(kernel.name, [], phases), workspace.bytes


@dataclass
class _Table:
    """Where the pointers of each argument of the function are among `args`: (fixed part, lists before it)."""

    places: list[tuple[int, int]]
    is_list: list[bool]
    is_element: list[bool]
    workspace: tuple[int, int]

    def __init__(self, kernel: Kernel, marks: list[set[str]]):
        self.is_list = ["nova.list" in m for m in marks]
        self.is_element = ["nova.element" in m for m in marks]
        self.places = [(0, 0)] * len(marks)
        first_output = len(marks) - kernel.outputs
        fixed, lists = HEAD, 0
        for group in (range(first_output), range(first_output, len(marks))):
            for position in (p for p in group if self.is_list[p]):
                self.places[position] = (fixed, lists)
                lists += 1
            for position in (p for p in group if not self.is_list[p]):
                self.places[position] = (fixed, lists)
                fixed += 1
        self.workspace = (fixed, lists)


def _load_i64(pointer: Value, position: Value) -> Value:
    return ln.load(ln.address(pointer, position, ln.int_type(64)), ln.int_type(64))


def _pointer(args: Value, n: Value, place: tuple[int, int], tensor: Value | None = None) -> Value:
    """args[fixed + lists * n + tensor] as a pointer."""
    fixed, lists = place
    position = ln.i64(fixed)
    if lists:
        position = ln.addi(position, ln.muli(n, ln.i64(lists)))
    if tensor is not None:
        position = ln.addi(position, tensor)
    return ln.load_pointer(ln.address(args, position, ln.int_type(64)))


def _head(args: Value) -> tuple[Value, Value]:
    """(n, pointer to numel)."""
    return _load_i64(args, ln.i64(0)), ln.load_pointer(ln.address(args, ln.i64(1), ln.int_type(64)))


def _total(n: Value, numel: Value) -> Value:
    def step(tensor: Value, carried: list[Value]) -> list[Value]:
        return [ln.addi(carried[0], _load_i64(numel, tensor))]

    return loop_i64(0, n, 1, [ln.i64(0)], step)[0]


def _chunk(total: Value) -> Value:
    """Elements a chunk: a function of the shapes only."""
    return ln.muli(ln.addi(ln.shrui(total, ln.i64(29)), ln.i64(1)), ln.i64(CHUNK))


def _tasks(args: Value) -> Value:
    n, numel = _head(args)
    total = _total(n, numel)
    chunk = _chunk(total)
    tasks = ln.divui(ln.addi(total, ln.subi(chunk, ln.i64(1))), chunk)
    return build.to_index(tasks)


def _needed(kernel: Kernel, roots: list[Generic]) -> list[Generic]:
    """The roots and what they read, in order."""
    wanted = {g.number for g in roots}
    for generic in reversed(kernel.generics):
        if generic.number in wanted:
            wanted |= {a.source.generic for a in generic.inputs if isinstance(a.source, Result)}
    return [g for g in kernel.generics if g.number in wanted]


def _stores_scalars(generic: Generic) -> bool:
    """Whether it writes something once a tensor: a scalar, or a reduction that is itself a result of the kernel."""
    return (not generic.dims or generic.is_reduction) and any(o.stores for o in generic.outputs)


def _nest(kernel: Kernel, generics: list[Generic]) -> Nest:
    nest = Nest(generics, [], None)
    schedule_steps(kernel, nest)
    return nest


def _emit_elements(
    kernel: Kernel, table: _Table, slots: dict[Key, parallel.Slot], region: parallel.Region, target: CpuTarget
) -> None:
    """This thread's chunks, tensor by tensor."""
    generics = _needed(kernel, [g for g in kernel.generics if g.dims])
    for generic in generics:
        for access in generic.inputs:
            if isinstance(access.source, Result) and kernel.generics[access.source.generic].is_reduction:
                raise CompileError(f"kernel @{kernel.name}: an update uses a reduction of its own tensor")
    nest = _nest(kernel, generics)
    n, numel = _head(region.args)
    chunk = _chunk(_total(n, numel))
    begin, end = (ln.muli(build.to_i64(bound), chunk) for bound in (region.begin, region.end))
    shared = {p: _pointer(region.args, n, table.places[p]) for p in range(len(table.places)) if not table.is_list[p]}
    workspace = _pointer(region.args, n, table.workspace) if slots else None

    def tensor(t: Value, carried: list[Value]) -> list[Value]:
        first, size = carried[0], _load_i64(numel, t)
        last = ln.addi(first, size)
        low, high = ln.maxsi(begin, first), ln.minsi(end, last)
        branch = scf.IfOp(ln.cmpi("slt", low, high))
        with ir.InsertionPoint(branch.then_block):
            emitter = NestEmitter(kernel, nest, Storage([]), target.lanes("f32"), None)
            emitter.stores_rows = False
            emitter.storage.arguments = [
                _pointer(region.args, n, table.places[p], t) if table.is_list[p] else shared[p]
                for p in range(len(table.places))
            ]
            if not slots:
                _emit_span(emitter, kernel, ln.subi(low, first), ln.subi(high, low))
            else:

                def part(task: Value, nothing: list[Value]) -> list[Value]:
                    from_ = ln.maxsi(ln.muli(task, chunk), first)
                    to = ln.minsi(ln.muli(ln.addi(task, ln.i64(1)), chunk), last)
                    for key, slot in slots.items():
                        emitter.storage.partials[key] = _slot(workspace, slot, ln.addi(t, task))
                        output = kernel.generics[key[0]].outputs[key[1]]
                        if output.combiner is None:
                            raise CompileError(f"kernel @{kernel.name}: a reduction of unknown combination")
                        ln.store(identity(output.combiner, output.element), emitter.storage.partials[key])
                    _emit_span(emitter, kernel, ln.subi(from_, first), ln.subi(to, from_))
                    return nothing

                final = ln.divui(ln.addi(high, ln.subi(chunk, ln.i64(1))), chunk)
                loop_i64(ln.divui(low, chunk), final, 1, [], part)
            scf.YieldOp([])
        return [last]

    loop_i64(0, n, 1, [ln.i64(0)], tensor)


def _slot(workspace: Value, slot: parallel.Slot, position: Value) -> Value:
    base = ln.address(workspace, ln.i64(slot.offset), ln.int_type(8))
    return ln.address(base, position, slot.type.element_type)


def _emit_span(emitter: NestEmitter, kernel: Kernel, low: Value, length: Value) -> None:
    """All steps of one tensor, over elements low .. low + length."""
    emitter.spans = dict.fromkeys(kernel.sizes, (low, length))
    emitter.row_values = {}
    for step in emitter.nest.steps:
        emitter.emit_step(step)


def _emit_scalars(
    kernel: Kernel, table: _Table, slots: dict[Key, parallel.Slot], region: parallel.Region, target: CpuTarget
) -> None:
    """Per tensor: joins the partials of its reductions, then computes and stores its scalars."""
    roots = [g for g in kernel.generics if _stores_scalars(g)]
    scalars = [g for g in _needed(kernel, roots) if not g.dims]
    nest = _nest(kernel, scalars)
    n, numel = _head(region.args)
    chunk = _chunk(_total(n, numel)) if slots else None
    shared = {p: _pointer(region.args, n, table.places[p]) for p in range(len(table.places)) if not table.is_list[p]}
    workspace = _pointer(region.args, n, table.workspace) if slots else None

    def tensor(t: Value, carried: list[Value]) -> list[Value]:
        emitter = NestEmitter(kernel, nest, Storage([]), target.lanes("f32"), None)
        for p in range(len(table.places)):
            if table.is_list[p]:
                pointer = _pointer(region.args, n, table.places[p], t)
            else:
                pointer = shared[p]
                if table.is_element[p]:
                    pointer = ln.address(pointer, t, ir.RankedTensorType(kernel.types[p]).element_type)
            emitter.storage.arguments.append(pointer)
        first, last = carried[0], ln.addi(carried[0], _load_i64(numel, t))
        for key, slot in slots.items():
            total = _join(emitter, kernel, key, workspace, slot, t, first, last, chunk)
            emitter.finish_row_value(key, kernel.generics[key[0]].outputs[key[1]], total)
        for step in nest.steps:
            emitter.emit_step(step)
        return [last]

    loop_i64(0, n, 1, [ln.i64(0)], tensor)


def _join(
    emitter: NestEmitter, kernel: Kernel, key: Key, workspace: Value, slot: parallel.Slot, tensor: Value, first: Value,
    last: Value, chunk: Value,
) -> Value:  # fmt: skip
    """The whole reduction of one tensor from its partials, in chunk order; sums of f32 in f64."""
    output = kernel.generics[key[0]].outputs[key[1]]
    combiner = output.combiner
    assert combiner is not None
    wide = combiner == "arith.addf" and output.element == ln.f32()
    start = identity(combiner, output.element)
    if not is_identity(combiner, output.init, output.element):
        start = emitter.init_value(output)
    if wide:
        start = ln.cast("extf", start, ln.f64())
    partials = Cursor(ln.address(workspace, ln.i64(slot.offset), ln.int_type(8)), 1, output.element)

    def step(task: Value, carried: list[Value]) -> list[Value]:
        value = partials.read(ln.addi(tensor, task), 0)
        return [body.combine(combiner, carried[0], ln.cast("extf", value, ln.f64()) if wide else value)]

    # a tensor without elements meets no chunk: its first slot may be the next tensor's
    stop = ln.divui(ln.addi(last, ln.subi(chunk, ln.i64(1))), chunk)
    begin = ln.select(ln.cmpi("eq", first, last), stop, ln.divui(first, chunk))
    (total,) = loop_i64(begin, stop, 1, [start], step)
    return ln.cast("truncf", total, ln.f32()) if wide else total
