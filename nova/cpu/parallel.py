"""The shape every CPU kernel has: an entry of `void **args` that runs phases of independent tasks on PyTorch's threads.

    void k(void **args) {                                 one Phase(tasks=64, threads=8, emit=...)
      n = min(omp_get_max_threads(), 8)
      if (n <= 1) k_0(args[0], ..., ws, 0, 64, 1, 0);
      else GOMP_parallel(k_0_thread, args, n, 0);
    }
    void k_0_thread(void **args) {
      t = omp_get_thread_num(); n = omp_get_num_threads();
      k_0(args[0], ..., ws, t*64/n, (t+1)*64/n, 1, t);
    }

The pool is that of the libgomp PyTorch itself loaded: one pool, sized by `torch.set_num_threads`. Tasks are dealt
statically, and a task computes the same bits whoever runs it, so results don't depend on the number of threads: a
reduction over tasks keeps a partial per task, never per thread. Phases run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nova import mlir
from nova.cpu import build
from nova.mlir import arith, func, ir, llvm, scf

ALIGNMENT = 64  # of the workspace, and of every slot in it

# What an object file may ask of the process: PyTorch's libgomp.
RUNTIME_SYMBOLS = ("GOMP_parallel", "omp_get_max_threads", "omp_get_num_threads", "omp_get_thread_num")


@dataclass(frozen=True)
class Slot:
    """A buffer inside the workspace: `offset + thread * stride` bytes in."""

    type: ir.MemRefType
    offset: int
    stride: int = 0


@dataclass
class Workspace:
    """Lays out a kernel's scratch memory; `bytes` is what the caller must provide."""

    bytes: int = 0

    def shared(self, shape: Sequence[int], element: ir.Type) -> Slot:
        """One buffer, seen by all threads."""
        return self._slot(shape, element, copies=1)

    def per_thread(self, shape: Sequence[int], element: ir.Type, threads: int) -> Slot:
        """One buffer a thread; `threads` is the phase's most threads."""
        return self._slot(shape, element, copies=threads)

    def _slot(self, shape: Sequence[int], element: ir.Type, copies: int) -> Slot:
        type_ = ir.MemRefType.get(list(shape), element)
        size = -(-build.size_bytes(type_) // ALIGNMENT) * ALIGNMENT
        slot = Slot(type_, self.bytes, size if copies > 1 else 0)
        self.bytes += size * copies
        return slot


@dataclass(frozen=True)
class Region:
    """What a phase's body sees: the buffers, its share of the tasks, and who it is."""

    types: tuple[ir.MemRefType, ...]  # of the kernel's operands then results
    pointers: tuple[ir.Value, ...]  # their bare pointers
    args: ir.Value  # the raw `void **`
    workspace: ir.Value  # bare pointer
    begin: ir.Value
    end: ir.Value
    step: ir.Value
    thread: ir.Value

    @property
    def buffers(self) -> tuple[ir.Value, ...]:
        """The operands and results as memrefs, built at the insertion point."""
        pairs = zip(self.pointers, self.types, strict=True)
        return tuple(build.memref_from_pointer(pointer, type_) for pointer, type_ in pairs)

    @contextmanager
    def tasks(self) -> Iterator[ir.Value]:
        """A loop over this thread's tasks."""
        with build.loop(self.begin, self.end, self.step) as task:
            yield task

    def scratch(self, slot: Slot) -> ir.Value:
        """The memref of a workspace slot, this thread's own copy where it has one."""
        offset: ir.Value | int = slot.offset
        if slot.stride:
            share = arith.MulIOp(self.thread, build.index(slot.stride)).result
            offset = arith.AddIOp(share, build.index(slot.offset)).result
        return build.memref_from_pointer(build.offset_pointer(self.workspace, offset), slot.type)


@dataclass(frozen=True)
class Phase:
    """Independent tasks with a barrier after them.

    `tasks` may be a function of the raw `void **` for a count known only at run time. `threads` is the most threads
    worth using (1: run in the caller, no fork). `cyclic` deals task i to thread i mod n, for tasks of falling cost.
    """

    tasks: int | Callable[[ir.Value], ir.Value]
    threads: int
    emit: Callable[[Region], None]
    cyclic: bool = False
    name: str = field(default="")


def emit_kernel(
    name: str,
    buffers: Sequence[ir.Type],
    phases: Sequence[Phase],
    aliased: Sequence[int] = (),
) -> ir.Module:
    """Builds the module of a kernel: entry `name`, one function a phase.

    `buffers` are the types (tensor, memref or scalar) of operands then results; `aliased` the indices of those that
    may share memory with another (in-place pairs). Call it inside `mlir.context()`.
    """
    with mlir.context(), ir.Location.unknown():
        module = ir.Module.create()
        types = [build.memref_of(type_) for type_ in buffers]
        with ir.InsertionPoint(module.body):
            declared = any(phase.threads > 1 for phase in phases)
            if declared:
                _declare_runtime()
            for number, phase in enumerate(phases):
                _emit_body(f"{name}_{number}", types, phase, set(aliased))
                if phase.threads > 1:
                    _emit_thread(f"{name}_{number}", types, phase)
            _emit_entry(name, types, phases)
        return module


def _internal(op: func.FuncOp) -> func.FuncOp:
    op.attributes["llvm.linkage"] = ir.Attribute.parse("#llvm.linkage<internal>")
    return op


def _declare_runtime() -> None:
    declare("GOMP_parallel", ["!llvm.ptr", "!llvm.ptr", "i32", "i32"], None)
    for symbol in RUNTIME_SYMBOLS[1:]:
        declare(symbol, [], "i32")


def declare(symbol: str, operands: Sequence[str], result: str | None) -> None:
    """Declares an external C function at the insertion point (module level)."""
    type_ = ir.TypeAttr.get(ir.Type.parse(f"!llvm.func<{result or 'void'} ({', '.join(operands)})>"))
    llvm.LLVMFuncOp(symbol, type_)


def call(symbol: str, operands: Sequence[ir.Value], result: ir.Type | None = None) -> ir.Value | None:
    """Calls an external C function."""
    op = llvm.CallOp(result, list(operands), [], [], callee=ir.FlatSymbolRefAttr.get(symbol))
    return op.result if result is not None else None


def load_argument(args: ir.Value, position: int) -> ir.Value:
    """`args[position]` of the raw `void **`."""
    return llvm.LoadOp(build.pointer_type(), build.offset_pointer(args, 8 * position)).result


def _emit_body(name: str, types: Sequence[ir.MemRefType], phase: Phase, aliased: set[int]) -> None:
    pointer, index = build.pointer_type(), ir.IndexType.get()
    # args, buffers..., workspace, begin, end, step, thread
    inputs = [pointer] * (len(types) + 2) + [index] * 4
    op = _internal(func.FuncOp(name, ir.FunctionType.get(inputs, []), visibility="private"))
    noalias = ir.DictAttr.get({"llvm.noalias": ir.UnitAttr.get()})
    plain = ir.DictAttr.get({})
    op.arg_attrs = ir.ArrayAttr.get(
        [noalias if 1 <= i <= len(types) and i - 1 not in aliased else plain for i in range(len(inputs))]
    )
    with ir.InsertionPoint(op.add_entry_block()):
        args, *pointers, workspace, begin, end, step, thread = op.arguments
        phase.emit(Region(tuple(types), tuple(pointers), args, workspace, begin, end, step, thread))
        func.ReturnOp([])


def _call_body(name: str, args: ir.Value, types: Sequence[ir.MemRefType], share: Sequence[ir.Value]) -> None:
    pointers = [load_argument(args, i) for i in range(len(types) + 1)]
    func.CallOp([], name, [args, *pointers, *share])


def _task_count(phase: Phase, args: ir.Value) -> ir.Value:
    return build.index(phase.tasks) if isinstance(phase.tasks, int) else phase.tasks(args)


def _emit_thread(name: str, types: Sequence[ir.MemRefType], phase: Phase) -> None:
    op = _internal(func.FuncOp(f"{name}_thread", ir.FunctionType.get([build.pointer_type()], []), visibility="private"))
    with ir.InsertionPoint(op.add_entry_block()):
        args = op.arguments[0]
        i32 = ir.IntegerType.get_signless(32)
        thread = build.to_index(call("omp_get_thread_num", [], i32))
        count = build.to_index(call("omp_get_num_threads", [], i32))
        tasks = _task_count(phase, args)
        if phase.cyclic:
            begin, end, step = thread, tasks, count
        else:
            next_thread = arith.AddIOp(thread, build.index(1)).result
            begin, end = (
                arith.DivUIOp(arith.MulIOp(which, tasks).result, count).result for which in (thread, next_thread)
            )
            step = build.index(1)
        _call_body(name, args, types, [begin, end, step, thread])
        func.ReturnOp([])


def _emit_entry(name: str, types: Sequence[ir.MemRefType], phases: Sequence[Phase]) -> None:
    op = func.FuncOp(name, ir.FunctionType.get([build.pointer_type()], []))
    with ir.InsertionPoint(op.add_entry_block()):
        args = op.arguments[0]
        for number, phase in enumerate(phases):
            _emit_phase_call(f"{name}_{number}", args, types, phase)
        func.ReturnOp([])


def _emit_phase_call(name: str, args: ir.Value, types: Sequence[ir.MemRefType], phase: Phase) -> None:
    zero, one = build.index(0), build.index(1)
    if phase.threads <= 1:
        _call_body(name, args, types, [zero, _task_count(phase, args), one, zero])
        return
    i32 = ir.IntegerType.get_signless(32)
    available = call("omp_get_max_threads", [], i32)
    count = arith.MinSIOp(available, build.i32(phase.threads)).result
    alone = arith.CmpIOp(arith.CmpIPredicate.sle, count, build.i32(1)).result
    branch = scf.IfOp(alone, has_else=True)
    with ir.InsertionPoint(branch.then_block):
        _call_body(name, args, types, [zero, _task_count(phase, args), one, zero])
        scf.YieldOp([])
    with ir.InsertionPoint(branch.else_block):
        # The thunk is a func.func, which llvm.mlir.addressof may not name before conversion: take it as a constant.
        thread = func.ConstantOp(
            ir.FunctionType.get([build.pointer_type()], []), ir.FlatSymbolRefAttr.get(f"{name}_thread")
        ).result
        address = ir.Operation.create(
            "builtin.unrealized_conversion_cast", results=[build.pointer_type()], operands=[thread]
        ).result
        call("GOMP_parallel", [address, args, count, build.i32(0)])
        scf.YieldOp([])
