"""The warp simulator: runs level-5 kernels on NumPy, a block at a time, every thread of the block a row of the arrays.

    report = run(module_text, [x, y, None])        # y now holds what the kernels wrote
    report["kernel"].global_load.sectors           # what they did to get there

It is slow and strict: it stops at accesses out of bounds, at shared memory read before it is written, at races between
blocks and between threads that no barrier separates, at data whose asynchronous copy has not been waited for, and at
barriers or warp-wide instructions that some threads do not reach. It counts memory traffic, bank conflicts and
instructions.

Each operation of a function becomes one Python closure, once; then every block runs the closures in order. Threads
that do not take part in a branch are masked: their values are computed and dropped, their memory accesses not made.
The instructions are in tables, one a file: simulate_values (arithmetic), simulate_access (memory), simulate_warp
(shuffles, tensor cores), simulate_asm (the inline PTX templates).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nova import mlir
from nova.gpu import simulate_access, simulate_asm, simulate_values, simulate_warp
from nova.gpu import simulate_memory as counting
from nova.gpu.simulate_memory import WARP, Access, GlobalMemory, SharedMemory, SimulationError, Traffic, Where, pointer
from nova.gpu.simulate_order import GlobalOrder
from nova.gpu.simulate_values import Array, Builder, Kind
from nova.mlir import ir

__all__ = ["KernelReport", "Report", "SimulationError", "Traffic", "pointer", "run"]

Step = Callable[["Block"], None]
SHARED_LIMIT = 227 << 10

# --- reports ---------------------------------------------------------------------------------------------------------


@dataclass
class KernelReport:
    """What one launch did, all its blocks together. Instructions are counted once a warp that executes them."""

    name: str
    blocks: int = 0
    instructions: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)  # barriers, shuffles, mma.<type>.<shape>
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def _of(self, name: str) -> Traffic:
        return self.traffic.setdefault(name, Traffic())

    @property
    def global_load(self) -> Traffic:
        """Loads and the reading side of asynchronous copies."""
        return self._of("global_load")

    @property
    def global_store(self) -> Traffic:
        return self._of("global_store")

    @property
    def shared_load(self) -> Traffic:
        """Loads and ldmatrix."""
        return self._of("shared_load")

    @property
    def shared_store(self) -> Traffic:
        """Stores, stmatrix and the writing side of asynchronous copies."""
        return self._of("shared_store")

    @property
    def bank_conflicts(self) -> int:
        """Passes over the shared-memory banks beyond the fewest possible."""
        return self.shared_load.conflicts + self.shared_store.conflicts


@dataclass
class Report:
    """One entry a launch, in order."""

    kernels: list[KernelReport]

    def __getitem__(self, name: str | int) -> KernelReport:
        if isinstance(name, int):
            return self.kernels[name]
        return next(kernel for kernel in self.kernels if kernel.name == name)

    @property
    def global_bytes(self) -> int:
        """Bytes that the threads asked of global memory, both ways."""
        return sum(k.global_load.bytes + k.global_store.bytes for k in self.kernels)

    @property
    def bank_conflicts(self) -> int:
        return sum(k.bank_conflicts for k in self.kernels)


# --- the machine -----------------------------------------------------------------------------------------------------


class Block:
    """One block as it runs: a value for each SSA value, the mask of the threads taking part, and its memory."""

    def __init__(self, function: Function, memory_: GlobalMemory, grid: tuple[int, int, int], report: KernelReport):
        self.threads: int = function.threads
        self.warps: int = (self.threads + WARP - 1) // WARP
        self.thread: Array = np.arange(self.threads)
        self.grid: tuple[int, int, int] = grid
        self.block: tuple[int, int, int] = (0, 0, 0)
        self.memory = memory_
        self.report = report
        self.counters = report.counters
        self.function = function
        self.active: Array | None = None  # [threads] bool; None: all
        self.values: list[Any] = []
        self.executed: Counter[int] = Counter()
        self.shared = SharedMemory(0, 16)

    def start(self, block: tuple[int, int, int], arguments: Sequence[Array]) -> None:
        self.block = block
        self.active = None
        self.values = list(self.function.presets)
        self.values[: len(arguments)] = arguments
        self.shared = SharedMemory(self.function.shared_bytes, self.function.granule)

    # -- which threads

    def mask(self, extra: Array | None) -> Array | None:
        """The active threads for which `extra` holds too."""
        if extra is None:
            return self.active
        extra = self.everywhere(extra)
        return extra if self.active is None else self.active & extra

    def everywhere(self, x: Array) -> Array:
        """With a row for every thread."""
        return x if len(x) == self.threads else np.broadcast_to(x, (self.threads, *x.shape[1:]))

    def threads_of(self, extra: Array | None = None) -> Array:
        mask = self.mask(extra)
        return self.thread if mask is None else np.flatnonzero(mask)

    def active_count(self, extra: Array | None = None) -> int:
        mask = self.mask(extra)
        return self.threads if mask is None else int(np.count_nonzero(mask))

    def active_warps(self) -> int:
        if self.active is None:
            return self.warps
        padded = np.zeros(self.warps * WARP, np.bool_)
        padded[: self.threads] = self.active
        return int(padded.reshape(-1, WARP).any(axis=1).sum())

    def gathered(self, x: Array, extra: Array | None = None) -> Array:
        """The rows of the threads that take part."""
        mask = self.mask(extra)
        return self.everywhere(x) if mask is None else self.everywhere(x)[mask]

    def spread(self, rows: Array, extra: Array | None = None) -> Array:
        """Rows of the threads that take part, with zeros for the others."""
        mask = self.mask(extra)
        if mask is None:
            return rows
        result = np.zeros((self.threads, *rows.shape[1:]), rows.dtype)
        result[mask] = rows
        return result

    def access(self, where: Where, address: Array, size: int, align: int, extra: Array | None = None) -> Access:
        mask = self.mask(extra)
        if mask is None:
            return Access(where, self.thread, self.everywhere(address), size, align, self.block)
        return Access(where, np.flatnonzero(mask), self.everywhere(address)[mask], size, align, self.block)

    # -- what must hold

    def require_all(self, where: Where) -> None:
        """All threads of the block must be here."""
        if self.active is not None and not self.active.all():
            missing = int(np.argmin(self.active))
            raise SimulationError(
                f"{where}\n  thread {missing}, block {self.block}: does not reach what all threads must"
            )

    def require_warps(self, where: Where) -> None:
        """Whole warps must be here."""
        if self.threads % WARP:
            raise SimulationError(f"{where}\n  expected whole warps, got {self.threads} threads")
        if self.active is None:
            return
        rows = self.active.reshape(-1, WARP)
        if (rows.any(axis=1) & ~rows.all(axis=1)).any():
            warp = int(np.argmax(rows.any(axis=1) & ~rows.all(axis=1)))
            raise SimulationError(f"{where}\n  warp {warp}, block {self.block}: only some of its threads get here")

    def require_members(self, where: Where, members: Array) -> None:
        """The threads that a member mask names must be those that are here."""
        bits = self.everywhere(members).view(np.uint32)
        named = ((bits >> (self.thread % WARP).astype(np.uint32)) & np.uint32(1)).astype(np.bool_)
        here = np.ones(self.threads, np.bool_) if self.active is None else self.active
        if (here & ~named).any():
            thread = int(np.argmax(here & ~named))
            raise SimulationError(f"{where}\n  thread {thread}: not in its own member mask {int(bits[thread]):#x}")
        lanes = ((bits[:, None] >> np.arange(WARP, dtype=np.uint32)) & np.uint32(1)).astype(np.bool_)
        padded = np.ones(self.warps * WARP, np.bool_)  # lanes that no thread has are not waited for
        padded[: self.threads] = here
        present = np.repeat(padded.reshape(-1, WARP), WARP, axis=0)[: self.threads]
        if (lanes & ~present & here[:, None]).any():
            raise SimulationError(f"{where}\n  block {self.block}: waits for threads that do not get here")

    # -- counting

    def count_global(self, name: str, access: Access) -> None:
        self.report._of(name).add(counting.global_traffic(access))

    def counted_global(self, access: Access) -> Access:
        self.count_global("global_load", access)
        return access

    def count_shared(self, name: str, access: Access) -> None:
        self.report._of(name).add(counting.shared_traffic(access))

    def count_copy(self, access: Access) -> None:
        self.count_shared("shared_store", access)


class Region:
    """Operations in order, as closures; what its yield passes on."""

    def __init__(self, number: int):
        self.number = number
        self.steps: list[Step] = []
        self.where: list[Where] = []
        self.names: Counter[str] = Counter()
        self.yields: list[int] = []

    def run(self, s: Block) -> list[Any]:
        """Runs the operations; returns the yielded values."""
        s.executed[self.number] += s.active_warps()
        position = 0
        try:
            for step in self.steps:
                step(s)
                position += 1
        except (SimulationError, NotImplementedError):
            raise
        except Exception as error:
            text = f"{self.where[position]}\n  the simulator failed: {error!r}"
            raise SimulationError(text) from error
        return [s.values[x] for x in self.yields]


@dataclass
class Function:
    """A compiled function."""

    name: str
    threads: int
    grid: tuple[int, int, int] | None
    arguments: list[Kind]
    presets: list[Any]  # constants in the slots of their values
    body: Region
    regions: list[Region]
    shared_bytes: int
    granule: int  # smallest shared-memory access, in bytes
    global_granule: int  # smallest global one


class Program:
    """A parsed module: its functions, and where its global variables lie."""

    def __init__(self, text: str):
        with mlir.context():
            self.module = ir.Module.parse(text)
        self.shared_globals: dict[str, int] = {}
        self.constant_globals: dict[str, Array] = {}
        self.addresses: dict[str, int] = {}
        self.static_shared = 0
        functions = []
        for op in _operations(self.module):
            if op.name == "llvm.mlir.global":
                self._add_global(op)
            elif op.name == "llvm.func" and len(op.regions[0].blocks):
                functions.append(op)
        self.ops = functions
        self.functions = {_name(op): op for op in functions}

    def _add_global(self, op: ir.Operation) -> None:
        name, space = _name(op), int(op.attributes["addr_space"].value) if "addr_space" in op.attributes else 0
        type_text = str(op.attributes["global_type"].value)
        if space == simulate_access.SHARED:
            size = simulate_values.size_of(type_text)
            align = int(op.attributes["alignment"].value) if "alignment" in op.attributes else 16
            if size:
                self.static_shared = -(-self.static_shared // align) * align
                self.shared_globals[name] = self.static_shared
                self.static_shared += size
            else:
                self.shared_globals[name] = -1  # dynamic: after all static ones
        elif "value" in op.attributes:
            self.constant_globals[name] = np.array(op.attributes["value"])

    def place_globals(self, memory_: GlobalMemory) -> None:
        """Puts constant tables into global memory, before a function that names them is compiled."""
        for name, data in self.constant_globals.items():
            self.addresses[name] = memory_.add(data)

    def global_address(self, name: str) -> int:
        if name in self.shared_globals:
            offset = self.shared_globals[name]
            return offset if offset >= 0 else -(-self.static_shared // 1024) * 1024
        return self.addresses[name]

    def shared_bytes(self, dynamic: int) -> int:
        if not dynamic:
            return self.static_shared
        return -(-self.static_shared // 1024) * 1024 + dynamic


def _operations(module: ir.Module) -> Iterable[ir.Operation]:
    """Top-level operations, also those inside a gpu.module."""
    for op in module.body.operations:
        if op.operation.name == "gpu.module":
            yield from (inner.operation for inner in op.operation.regions[0].blocks[0].operations)
        else:
            yield op.operation


def _name(op: ir.Operation) -> str:
    return str(op.attributes["sym_name"].value)


# --- compiling a function --------------------------------------------------------------------------------------------


class Compiler:
    """Turns one function into closures. Every SSA value gets a slot of the block's list of values."""

    def __init__(self, program: Program, op: ir.Operation):
        self.program = program
        self.op = op
        self.slot_of: dict[ir.Value, int] = {}
        self.presets: list[Any] = []
        self.regions: list[Region] = []
        self.granule = self.global_granule = 16

    def compile(self) -> Function:
        block = self.op.regions[0].blocks[0]
        arguments = [self.kind(x) for x in block.arguments]
        for argument in block.arguments:
            self.slot(argument)
        body = self.region(block)
        dynamic = int(_number(self.op, "nova_gpu.shared") or 0)
        return Function(
            _name(self.op), self._threads(), _triple(self.op, ("nova_gpu.grid", "nova_tile.grid")), arguments,
            self.presets, body, self.regions, self.program.shared_bytes(dynamic), self.granule,
            self.global_granule,
        )  # fmt: skip

    def _threads(self) -> int:
        for name in ("nvvm.reqntid", "nvvm.maxntid"):
            if name in self.op.attributes:
                return int(np.prod([int(x) for x in self.op.attributes[name]]))
        return int(_number(self.op, "nova_tile.threads") or WARP)

    # -- what instruction builders use

    def slot(self, value: ir.Value) -> int:
        if value not in self.slot_of:
            self.slot_of[value] = len(self.presets)
            self.presets.append(None)
        return self.slot_of[value]

    def slots(self, values: Iterable[ir.Value]) -> list[int]:
        return [self.slot(value) for value in values]

    def kind(self, value: ir.Value) -> Kind:
        return simulate_values.kind_of(value.type)

    def where(self, op: ir.Operation) -> Where:
        """The operation for messages."""
        return Where(_name(self.op), op)

    def touches(self, space: int, size: int, align: int) -> None:
        """Notes an access: the smallest one to shared and to global memory decides how finely races are tracked."""
        if space == simulate_access.SHARED:
            self.granule = min(self.granule, size & -size, align)
        else:
            self.global_granule = min(self.global_granule, size & -size, align)

    def pure(self, op: ir.Operation, function: Callable[..., Any]) -> Step:
        """A step that computes the only result from the operands."""
        (result,) = self.slots(op.results)
        sources = self.slots(op.operands)
        if len(sources) == 1:
            (a,) = sources

            def unary(s: Block) -> None:
                s.values[result] = function(s.values[a])

            return unary
        if len(sources) == 2:
            a, b = sources

            def binary(s: Block) -> None:
                v = s.values
                v[result] = function(v[a], v[b])

            return binary

        def many(s: Block) -> None:
            v = s.values
            v[result] = function(*[v[x] for x in sources])

        return many

    def multiple(self, op: ir.Operation, function: Callable[..., Sequence[Any]]) -> Step:
        """A step with several results."""
        results, sources = self.slots(op.results), self.slots(op.operands)

        def step(s: Block) -> None:
            v = s.values
            for slot, value in zip(results, function(*[v[x] for x in sources]), strict=True):
                v[slot] = value

        return step

    def preset(self, op: ir.Operation, value: Any) -> Step:
        """A constant: it is in its slot before the function starts."""
        (result,) = self.slots(op.results)
        self.presets[result] = value
        return _nothing

    def region(self, block: ir.Block) -> Region:
        """Compiles a block and everything in it."""
        region = Region(len(self.regions))
        self.regions.append(region)
        for child in block.operations:
            op = child.operation
            if op.name in ("scf.yield", "llvm.return", "scf.condition"):
                region.yields = self.slots(op.operands)
                continue
            builder = TABLE.get(op.name)
            if builder is None:
                raise NotImplementedError(f"the simulator has no {op.name}: {self.where(op)}")
            step = builder(self, op)
            region.names[op.name] += 1
            if step is not _nothing:
                region.steps.append(step)
                region.where.append(self.where(op))
        return region


def _nothing(s: Block) -> None:
    pass


def _number(op: ir.Operation, name: str) -> int | None:
    return int(op.attributes[name].value) if name in op.attributes else None


def _triple(op: ir.Operation, names: Sequence[str]) -> tuple[int, int, int] | None:
    for name in names:
        if name in op.attributes:
            x, y, z = ([int(n) for n in op.attributes[name]] + [1, 1])[:3]
            return x, y, z
    return None


# --- structured control flow -----------------------------------------------------------------------------------------


def _merge(mask: Array | None, new: Any, old: Any) -> Any:
    """`new` for the threads of the mask, `old` for the others."""
    if mask is None:
        return new
    if isinstance(new, tuple):
        return tuple(_merge(mask, a, b) for a, b in zip(new, old, strict=True))
    return simulate_values.select(mask, new, old)


def _for(c: Compiler, op: ir.Operation) -> Step:
    low, high, step_, *starts = c.slots(op.operands)
    block = op.regions[0].blocks[0]
    counter, *carried = c.slots(block.arguments)
    results = c.slots(op.results)
    region = c.region(block)
    is_unsigned = "unsignedCmp" in op.attributes

    def step(s: Block) -> None:
        v = s.values
        i, end, stride = v[low], v[high], v[step_]
        if is_unsigned:
            i, end = simulate_values.unsigned(i), simulate_values.unsigned(end)
        current = [v[x] for x in starts]
        outer = s.active
        while True:
            running = i < end
            if not (running.all() if outer is None else s.everywhere(running)[outer].all()):
                s.active = s.mask(running)
                if s.active is None or not s.active.any():
                    break
            v[counter] = i if not is_unsigned else i.view(v[low].dtype)
            for slot, value in zip(carried, current, strict=True):
                v[slot] = value
            new = region.run(s)
            mask = s.active if s.active is not outer else None
            current = [_merge(mask, a, b) for a, b in zip(new, current, strict=True)]
            i = i + stride
        s.active = outer
        for slot, value in zip(results, current, strict=True):
            v[slot] = value

    return step


def _if(c: Compiler, op: ir.Operation) -> Step:
    (condition,) = c.slots(op.operands)
    results = c.slots(op.results)
    regions = [c.region(r.blocks[0]) if len(r.blocks) else None for r in op.regions]

    def step(s: Block) -> None:
        v = s.values
        taken = v[condition]
        outer = s.active
        seen = taken if outer is None or len(taken) == 1 else taken[outer]
        if seen.all() or not seen.any():
            region = regions[0] if seen.all() else regions[1]
            values = region.run(s) if region is not None else []
        else:
            s.active = s.mask(taken)
            values = regions[0].run(s) if regions[0] is not None else []
            if regions[1] is not None:
                s.active = ~taken if outer is None else outer & ~taken
                others = regions[1].run(s)
                values = [_merge(taken, a, b) for a, b in zip(values, others, strict=True)]
            s.active = outer
        for slot, value in zip(results, values, strict=True):
            v[slot] = value

    return step


def _while(c: Compiler, op: ir.Operation) -> Step:
    starts, results = c.slots(op.operands), c.slots(op.results)
    before_block, after_block = op.regions[0].blocks[0], op.regions[1].blocks[0]
    before_arguments, after_arguments = c.slots(before_block.arguments), c.slots(after_block.arguments)
    before, after = c.region(before_block), c.region(after_block)

    def step(s: Block) -> None:
        v = s.values
        outer = s.active
        current = [v[x] for x in starts]
        done: list[Any] | None = None
        while True:
            for slot, value in zip(before_arguments, current, strict=True):
                v[slot] = value
            condition, *passed = before.run(s)
            done = passed if done is None else [_merge(s.active, a, b) for a, b in zip(passed, done, strict=True)]
            seen = s.gathered(condition)
            if not seen.any():
                break
            if not seen.all():
                s.active = s.mask(condition)
            for slot, value in zip(after_arguments, done, strict=True):
                v[slot] = value
            current = after.run(s)
        s.active = outer
        for slot, value in zip(results, done, strict=True):
            v[slot] = value

    return step


TABLE: dict[str, Builder] = {
    **simulate_values.TABLE, **simulate_access.TABLE, **simulate_warp.TABLE, **simulate_asm.TABLE,
    "scf.for": _for, "scf.if": _if, "scf.while": _while,
}  # fmt: skip


# --- running ---------------------------------------------------------------------------------------------------------


def run(
    module_text: str,
    buffers: Sequence[Any],
    kernels: Sequence[str] | None = None,
    grid: tuple[int, int, int] | None = None,
    blocks: Iterable[tuple[int, int, int]] | None = None,
    memory: Sequence[Array] = (),
    ordered: bool = True,
) -> Report:
    """Runs kernels of a level-5 module one after another (default: all, in order) on the same arguments.

    `buffers` holds one entry an argument: an array for a pointer (changed in place; bf16 as uint16), None for a null
    pointer, a number for a scalar. `grid` overrides the functions' grid attribute; `blocks` runs only some blocks.
    `memory`: arrays that the addresses (`array.ctypes.data`) in tables of words may point into.
    `ordered`: whether threads that nothing orders may not write to one place, as they may when an index repeats.
    Raises SimulationError, with the operation, for what the module's docstring lists.
    """
    program = Program(module_text)
    state = GlobalMemory(buffers, memory)
    program.place_globals(state)
    chosen = list(blocks) if blocks is not None else None
    reports = []
    with np.errstate(all="ignore"):
        for name in kernels if kernels is not None else program.functions:
            function = Compiler(program, program.functions[name]).compile()
            state.order = GlobalOrder(function.global_granule) if ordered else None
            reports.append(_launch(function, state, buffers, grid, chosen))
    state.write_back()
    return Report(reports)


def _arguments(function: Function, buffers: Sequence[Any]) -> list[Array]:
    if len(buffers) != len(function.arguments):
        raise SimulationError(f"{function.name}: expected {len(function.arguments)} arguments, got {len(buffers)}")
    values = []
    for position, (kind, buffer) in enumerate(zip(function.arguments, buffers, strict=True)):
        if kind.element == "ptr":
            values.append(np.array([pointer(position) if buffer is not None else 0], np.int64))
        else:
            values.append(np.array([buffer], kind.dtype))
    return values


def _launch(
    function: Function,
    state: GlobalMemory,
    buffers: Sequence[Any],
    grid: tuple[int, int, int] | None,
    chosen: list[tuple[int, int, int]] | None,
) -> KernelReport:
    size = grid or function.grid or (1, 1, 1)
    if function.shared_bytes > SHARED_LIMIT:
        raise SimulationError(
            f"{function.name}: {function.shared_bytes} bytes of shared memory, at most {SHARED_LIMIT}"
        )
    report = KernelReport(function.name)
    arguments = _arguments(function, buffers)
    block = Block(function, state, size, report)
    every = ((x, y, z) for z, y, x in itertools.product(range(size[2]), range(size[1]), range(size[0])))
    for place in chosen if chosen is not None else every:
        block.start(place, arguments)
        if state.order is not None:
            state.order.start_block()
        function.body.run(block)
        report.blocks += 1
    for region in function.regions:
        for name, count in region.names.items():
            report.instructions[name] += count * block.executed[region.number]
    return report
