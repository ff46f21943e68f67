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

from nova.fusion import readback
from nova.fusion.kernel import Expr, Out, Tensor, rewrite
from nova.mlir import ir
from nova.schedule.target import GpuTarget
from nova.tile.builder import Program
from nova.tile.expressions import Part, memory_element
from nova.tile.layout import blocked
from nova.tile.multi_tensor_elements import elements, share, start
from nova.tile.multi_tensor_launch import Launch, Scalars, store_scalars
from nova.tile.multi_tensor_plan import Plan, unit_of
from nova.tile.text import Operand


def generate(func_op: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launches of a kernel, and its workspace in bytes."""
    plan = Plan(readback.read(func_op), target)
    programs = [_prepare(plan)]
    if plan.elements:
        programs.append(elements(plan))
    if plan.late:
        programs.append(_join(plan))
    return programs, plan.workspace


def _prepare(plan: Plan) -> Program:
    """Block 0 counts units, the others compute scalars."""
    workers = plan.target.sms if plan.early else 0
    launch = Launch(plan, "prepare", 1 + workers, 128)
    p = launch.program
    block = p.program_id(0)
    with p.if_(p.compare("eq", block, 0)):
        _count_units(launch, unit_of(plan)[0])
    if workers:
        with p.if_(p.compare("ne", block, 0)), p.for_(p.sub(block, 1), launch.count, workers) as loop:
            store_scalars(launch, Scalars(launch, loop.index), plan.early)
    return p


def _count_units(launch: Launch, unit: int) -> None:
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


def _join(plan: Plan) -> Program:
    launch = Launch(plan, "join", plan.target.sms, 128)
    p = launch.program
    each = p.max(share(launch), 1)
    with p.for_(p.program_id(0), launch.count, plan.target.sms) as loop:
        scalars = Scalars(launch, loop.index)
        begin, end = launch.first(loop.index), launch.first(p.add(loop.index, 1))
        first = p.div(begin, each)
        # a tensor without elements meets no block
        last = p.select(p.compare("eq", begin, end), first, p.add(p.div(p.sub(end, 1), each), 1))
        for tensor, out in plan.partials.items():
            scalars.known[tensor] = _joined(launch, loop.index, tensor, out, first, last)
        late = [Out(o.tensor, o.index, _inlined(plan, o.value)) for o in plan.late]
        store_scalars(launch, scalars, late)
    return p


def _inlined(plan: Plan, root: Expr) -> Expr:
    """With late locals replaced by their definitions."""

    def change(node: Expr) -> Expr | None:
        if node.op == "load" and node.attr[0].kind == "local" and node.attr[0] in plan.definitions:
            return _inlined(plan, plan.definitions[node.attr[0]])
        return None

    return rewrite(root, change)


def _joined(launch: Launch, number: Operand, tensor: Tensor, out: Out, first: Operand, last: Operand) -> Part:
    """The whole reduction of one tensor, in order of the blocks; sums of f32 in f64."""
    p = launch.program
    element, kind = memory_element(tensor.dtype), str(out.combine).split(".")[1]
    wide = "f64" if (element, kind) == ("f32", "addf") else element
    layout = blocked([p.threads], [p.threads // 32], [32])
    slots = p.advance(launch.slot(launch.plan.slots[tensor]), p.cast(number, "i64"), element)
    with p.for_(first, last, p.threads, [p.scalar(out.init, wide)]) as loop:
        place = p.binary("arith.addi", p.iota(0, layout), loop.index)
        inside = p.cmp("slt", place, last)
        parts = p.gather(slots, place, element, inside, fill=start(out))
        total = p.reduce(p.convert(parts, wide), [0], kind)
        loop.yield_([p.binary(str(out.combine), loop.carried[0], total)])
    return Part(p.convert(loop.results[0], element), (), element)
