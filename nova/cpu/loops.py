"""Kernels of kind "loops": elementwise chains, row and column reductions, copies, gathers, and mixes of them.

    func.func private @k(...) {nova.kernel = "loops"}  ->  loops_ir (plain data) -> loops_plan (nests) -> vector loops

Every nest is one phase of the kernel (a fork-join); a nest with reductions across rows has a second one that merges
the partials in order. Args layout: operands, results, workspace, error record.
"""

from __future__ import annotations

import math

from nova.cpu import build, parallel
from nova.cpu.loops_emit import NestEmitter, Storage
from nova.cpu.loops_ir import Access, Argument, Kernel, Result, read_kernel
from nova.cpu.loops_merge import cross_keys, merge_phase, slot_pointer, start_partial
from nova.cpu.loops_plan import TILE_WIDTH, Nest, local_size, plan
from nova.cpu.loops_values import Key
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf
from nova.schedule.target import CpuTarget

STREAM_ALIGNMENT = 64


def lower(func_op: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    """The kernel's module and its workspace in bytes."""
    kernel = read_kernel(func_op)
    nests = plan(kernel, target)
    layout = _Layout(nests, target)
    phases = []
    for nest in nests:
        phases.append(_rows_phase(kernel, nest, layout, target))
        if nest.cross:
            phases.append(merge_phase(kernel, nest, layout.partials, layout.whole, target))
    aliased = {position for pair in kernel.inplace for position in pair}
    module = parallel.emit_kernel(kernel.name, kernel.types, phases, sorted(aliased))
    return module, layout.workspace.bytes


class _Layout:
    """Slots in the workspace for everything that is not an argument."""

    def __init__(self, nests: list[Nest], target: CpuTarget):
        self.workspace = parallel.Workspace()
        self.scratch: dict[Key, parallel.Slot] = {}
        self.whole: dict[Key, parallel.Slot] = {}
        self.partials: dict[Key, parallel.Slot] = {}
        self.tiles: dict[Access, parallel.Slot] = {}
        nest_of = {g.number: nest for nest in nests for g in nest.generics}
        for nest in nests:
            for access in nest.tile[1] if nest.tile else ():
                size = target.lanes("f32") * TILE_WIDTH
                self.tiles[access] = self.workspace.per_thread([size], ln.memory_type(access.element), nest.threads)
            for cross in nest.cross:
                element = cross.output.element
                line = 64 // ln.bytes_of(element)  # partials of different tasks share no cache line
                padded = -(-cross.size // line) * line
                self.partials[cross.key] = self.workspace.shared([nest.tasks, padded], ln.memory_type(element))
            for generic in nest.generics:
                for number, output in enumerate(generic.outputs):
                    if output.stores:
                        continue  # later readers find it where the caller will
                    key, element = (generic.number, number), ln.memory_type(output.element)
                    elsewhere = any(nest_of[c] is not nest for c in generic.consumers)
                    if key in self.partials or elsewhere:
                        size = max(math.prod(output.shape), 1)
                        self.whole[key] = self.workspace.shared([size], element)
                    elif self._needs_scratch(nest, generic.number, number):
                        size = max(local_size(output, nest.row_dims()), 1)
                        self.scratch[key] = self.workspace.per_thread([size], element, nest.threads)

    @staticmethod
    def _needs_scratch(nest: Nest, generic: int, number: int) -> bool:
        """Whether the value must outlive its loop, or is a reduction that keeps some of the inner dims."""
        home = next(s for s in nest.steps if any(g.number == generic for g in s.generics))
        producer = next(g for g in home.generics if g.number == generic)
        row_dims = nest.row_dims()
        if not home.inner:
            return False
        if producer.is_reduction:
            return any(d not in producer.reduced and d not in row_dims for d in producer.dims)
        for step in nest.steps:
            for consumer in step.generics:
                accesses = [*consumer.inputs, *(o.init.access for o in consumer.outputs if o.init.access)]
                if step is not home and any(a.source == Result(generic, number) for a in accesses):
                    return True
        return False


def _storage(region: parallel.Region, layout: _Layout, nest: Nest) -> Storage:
    storage = Storage(region.pointers)
    numbers = {g.number for g in nest.generics}
    storage.scratch = {k: slot_pointer(region, s) for k, s in layout.scratch.items() if k[0] in numbers}
    reads = {a.source for g in nest.generics for a in g.inputs if isinstance(a.source, Result)}
    reads |= {Result(g.number, n) for g in nest.generics for n in range(len(g.outputs))}
    storage.tiles = {a: slot_pointer(region, layout.tiles[a]) for a in (nest.tile[1] if nest.tile else ())}
    storage.whole = {
        key: slot_pointer(region, slot)
        for key, slot in layout.whole.items()
        if Result(*key) in reads and key not in cross_keys(nest)
    }
    return storage


def _rows_phase(kernel: Kernel, nest: Nest, layout: _Layout, target: CpuTarget) -> parallel.Phase:
    def emit(region: parallel.Region) -> None:
        storage = _storage(region, layout, nest)
        error = _error_pointer(region, kernel)
        begin, end = build.to_i64(region.begin), build.to_i64(region.end)
        emitter = NestEmitter(kernel, nest, storage, target.lanes("f32"), error)
        if nest.cross:
            with build.loop(region.begin, region.end) as task:
                _emit_task(emitter, nest, layout, region, build.to_i64(task))
        elif nest.nontemporal:
            _emit_streaming(kernel, nest, emitter, region, begin, end)
        else:
            emitter.emit_rows(begin, end)

    tasks = nest.tasks if nest.cross else nest.row_count
    return parallel.Phase(tasks, nest.threads, emit)


def _error_pointer(region: parallel.Region, kernel: Kernel) -> Value | None:
    return parallel.load_argument(region.args, len(kernel.types) + 1) if kernel.raises else None


def _emit_task(emitter: NestEmitter, nest: Nest, layout: _Layout, region: parallel.Region, task: Value) -> None:
    """One task of a nest with partials: start them, run the task's rows."""
    for cross in nest.cross:
        slot = layout.partials[cross.key]
        offset = ln.muli(task, ln.i64(slot.type.shape[1]))
        pointer = ln.address(slot_pointer(region, slot), offset, cross.output.element)
        emitter.storage.partials[cross.key] = pointer
        start_partial(emitter, cross, pointer)
    rows, per_task = nest.row_count, nest.rows_per_task
    if nest.tasks == 1:
        emitter.emit_rows(0, rows)
        return
    begin = ln.muli(task, ln.i64(per_task))
    emitter.emit_rows(begin, ln.minsi(ln.addi(begin, ln.i64(per_task)), ln.i64(rows)))


def _emit_streaming(
    kernel: Kernel, nest: Nest, emitter: NestEmitter, region: parallel.Region, begin: Value, end: Value
) -> None:
    """Nontemporal stores need aligned buffers: a second copy of the nest serves the others."""
    stores = [s.source for g in nest.generics for o in g.outputs for s in o.stores]
    outputs = {source.position for source in stores if isinstance(source, Argument)}
    bits = None
    for position in sorted(outputs):
        address = ln.create("llvm.ptrtoint", ln.int_type(64), [region.pointers[position]])
        bits = address if bits is None else ln.ori(bits, address)
    if bits is None:
        emitter.emit_rows(begin, end)
        return
    low = ln.andi(bits, ln.i64(STREAM_ALIGNMENT - 1))
    branch = scf.IfOp(ln.cmpi("eq", low, ln.i64(0)), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        emitter.streams = True
        emitter.emit_rows(begin, end)
        emitter.streams = False
        scf.YieldOp([])
    with ir.InsertionPoint(branch.else_block):
        emitter.emit_rows(begin, end)
        scf.YieldOp([])
