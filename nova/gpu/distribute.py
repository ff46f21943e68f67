"""Level 4 to level 5: a tile program becomes the code of one thread.

    %x = "nova_tile.load"(%p, %b, %i) {layout = .., ..}         %q = llvm.getelementptr %p[%thread_part] ..
    %y = arith.addf %x, %x : vector<64x128xf32>           ->    %x0 = llvm.load %q : !llvm.ptr<1> -> vector<4xf32> ..
                                                                %y = arith.addf %x, %x : vector<32xf32>

A tile of K registers a thread is one `vector<Kxelement>`; a tile whose elements are all the same stays a scalar until
something needs its registers. The functions that lower ops live by family in the modules of FAMILIES, each registered

    @lowers("nova_tile.iota")
    def iota(it: Distributor, op: Op) -> None:
        layout = op["layout"]                                   # attributes as Python values and NestedLayouts
        ...
        it.set(op.results[0], value)                            # of shape (layout.registers,), with its layout

with `it.tile(op.operands[0], layout)` for an operand as registers, `it.scalar_of(operand)` for a uniform one,
`it.number_of(operand)` for a uniform integer that may be a Python int, and everything of ThreadCode to emit code:
`it.result("arith.negf %x : f32", "f32")`, `it.thread_sum`, `it.load`, ... Shared memory: `it.buffer_of(operand)` for an
alloc_shared, `with it.scratch(bytes) as pointer` for a transient area, `it.barrier()` between writing and reading it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nova.errors import CompileError
from nova.gpu.registers import SHARED, ThreadCode, element_bytes
from nova.gpu.shared_arena import Area, Arena, Cut
from nova.mlir import ir
from nova.tile.layout import WARP, NestedLayout
from nova.tile.text import Operand, Value

FAMILIES = (
    "nova.gpu.distribute_control",
    "nova.gpu.distribute_elementwise",
    "nova.gpu.distribute_memory",
    "nova.gpu.distribute_reduce",
    "nova.gpu.distribute_layout",
    "nova.gpu.distribute_scalars",
    "nova.gpu.distribute_scan",
    "nova.gpu.distribute_check",
    "nova.gpu.async_copy",
    "nova.gpu.fragments",
    "nova.gpu.mma_sync",
)
"""Modules whose import registers lowerings."""

SHARED_MEMORY = (
    "llvm.mlir.global external @nova_smem() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>"
)

LOWERINGS: dict[str, Callable[[Distributor, Op], None]] = {}


def lowers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers the function that lowers the ops of these names."""

    def register(function: Callable[[Distributor, Op], None]) -> Callable[[Distributor, Op], None]:
        for name in names:
            LOWERINGS[name] = function
        return function

    return register


class Op:
    """A level-4 op with what lowering wants to know of it; `op["strides"]` is an attribute as a Python value."""

    __slots__ = ("attributes", "name", "operands", "operation", "results")

    def __init__(self, operation: Any):
        self.operation, self.name = operation, operation.name
        self.operands, self.results = list(operation.operands), list(operation.results)
        self.attributes = operation.attributes

    def __getitem__(self, name: str) -> Any:
        return attribute_value(self.attributes[name])

    def __contains__(self, name: str) -> bool:
        return name in self.attributes


_values: dict[Any, Any] = {}


def attribute_value(attribute: Any) -> Any:
    """Numbers, strings, tuples of integers, layouts; other attributes as they are."""
    found = _values.get(attribute)
    if found is None:
        if isinstance(attribute, ir.DictAttr):
            found = NestedLayout.parse(attribute)
        elif isinstance(attribute, ir.DenseI64ArrayAttr):
            found = tuple(attribute)
        else:
            found = getattr(attribute, "value", attribute)
        if len(_values) > 20000:
            _values.clear()
        _values[attribute] = found
    return found


@dataclass(frozen=True)
class Buffer:
    """An alloc_shared: `stages` matrices of rows x columns, at a static address."""

    pointer: Value
    offset: int  # bytes from the start of the block's shared memory
    stages: int
    rows: int
    columns: int
    element: str
    swizzle: str


@dataclass(frozen=True)
class Checkpoint:
    """A place in the code of a thread, and what was known there."""

    lines: int
    known: dict[Any, Value | Buffer]
    broadcasts: dict[tuple[str, int], Value]
    expiring: list[tuple[int, Area]]
    arena: Arena


def is_tile(value: Any) -> bool:
    """Of a level-4 value."""
    return isinstance(value.type, ir.VectorType)


class Distributor(ThreadCode):
    """Writes the code of one thread of one function while its level-4 ops are walked in order."""

    def __init__(self, function: Any, dependent: bool = False):
        attributes = function.attributes
        self.dependent = dependent
        threads = attribute_value(attributes["nova_tile.threads"])
        super().__init__(threads, attribute_value(attributes["nova_tile.grid"]))
        self.name = attribute_value(attributes["sym_name"])
        self.min_blocks = attribute_value(attributes["nova_tile.min_blocks"])
        self.arena = Arena()
        self.known: dict[Any, Value | Buffer] = {}
        self.block = function.regions[0].blocks[0]
        self.arguments = [Value(f"%arg{i}", str(a.type)) for i, a in enumerate(self.block.arguments)]
        self.known.update(zip(self.block.arguments, self.arguments, strict=True))
        self.position = 0  # of the top-level op being lowered
        self.loops = 0  # loops around it
        self._siblings: tuple[Sequence[Any], int] = ((), 0)
        self.guarded = False  # what is written now stands in the region of a guard
        self.expiring: list[tuple[int, Area]] = []

    # --- values ---

    def set(self, result: Any, value: Value | Buffer) -> None:
        """What stands for a level-4 value from here on."""
        self.known[result] = value

    def of(self, value: Any) -> Value:
        """The scalar, or the registers, or the scalar that a tile of equal elements stays."""
        found = self.known[value]
        assert isinstance(found, Value), f"{value} is a buffer"
        return found

    def scalar_of(self, value: Any) -> Value:
        """A uniform scalar operand."""
        found = self.of(value)
        if found.shape is not None:
            raise CompileError(f"distribute: expected a scalar, got the tile {found!r}")
        return found

    def number_of(self, value: Any) -> Operand:
        """A uniform integer, folded to a Python int if it is constant."""
        return self.folded(self.scalar_of(value))

    def tile(self, value: Any, layout: NestedLayout) -> Value:
        """A tile operand's registers in `layout`, which must be its own unless all its elements are the same."""
        found = self.of(value)
        if found.shape is None:
            return self.broadcast(found, layout.registers, layout)
        if found.layout != layout:
            has = found.layout.text() if found.layout is not None else "none"
            raise CompileError(f"distribute: expected a tile of layout {layout.text()}, got {found!r} of layout {has}")
        return found

    def buffer_of(self, value: Any) -> Buffer:
        found = self.known[value]
        assert isinstance(found, Buffer), f"{value} is no buffer"
        return found

    # --- shared memory ---

    def shared(self, offset: int) -> Value:
        """A pointer to so many bytes after the start of the block's shared memory."""
        start = self.once("shared", lambda: self.result("llvm.mlir.addressof @nova_smem : !llvm.ptr<3>", SHARED))
        return self.once(("shared", offset), lambda: self.offset(start, offset))

    def allocate(self, size: int, last_use: int, alignment: int = 128) -> int:
        """Bytes that stay allocated until the top-level op at `last_use` is done: their offset."""
        area = self._take(size, alignment)
        self.expiring.append((last_use, area))
        return area.start

    @contextmanager
    def scratch(self, size: int, cut: Cut | None = None) -> Iterator[Value]:
        """A pointer to bytes that any thread may write now, and read after a `barrier`, until the end of the block.

        `cut`: each group of warps uses a piece of its own, and the barrier is that of its group."""
        area = self._take(size, 128, cut)
        yield self.shared(area.start)
        self.arena.release(area)

    def _take(self, size: int, alignment: int, cut: Cut | None = None) -> Area:
        area, wait = self.arena.take(size, alignment, cut)
        if wait:
            self.barrier()
        return area

    def barrier(self, by_warp: bool = False, warps: int = 0) -> None:
        """All threads of the block, or of each warp, or of each group of so many warps, wait and see each other's
        shared memory."""
        self.barrier_line(by_warp, warps)
        if not by_warp or self.threads <= WARP:
            self.arena.synchronised(warps)

    # --- the walk ---

    def checkpoint(self) -> Checkpoint:
        """What `roll_back` needs to write again what is written from here on."""
        return Checkpoint(
            len(self.lines), dict(self.known), dict(self.broadcasts.maps[0]), list(self.expiring), self.arena.copy()
        )

    def roll_back(self, to: Checkpoint) -> None:
        """Forgets what was written since. What stands in the function's entry stays: it may be used again."""
        del self.lines[to.lines :]
        self.known = dict(to.known)
        self.broadcasts.maps[0] = dict(to.broadcasts)
        self.expiring = list(to.expiring)
        self.arena = to.arena.copy()

    def lower(self, operation: Any) -> None:
        """One op, by its name or, for arith and math, as elementwise."""
        op = Op(operation)
        function = LOWERINGS.get(op.name) or LOWERINGS.get(op.name.split(".")[0])
        if function is None:
            raise CompileError(f"distribute: {op.name} in {self.name} has no lowering to threads")
        function(self, op)

    def in_order(self, operations: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(place, op) of a block's ops, each to be lowered before the next: it may look ahead by `following`."""
        outer = self._siblings
        for place, op in enumerate(operations):
            self._siblings = operations, place
            yield place, op.operation
        self._siblings = outer

    def following(self) -> Iterator[Any]:
        """The ops after the one that is being lowered, in its block."""
        operations, place = self._siblings
        for op in operations[place + 1 :]:
            yield op.operation

    def function(self) -> str:
        """The text of the whole function."""
        operations = list(self.block.operations)
        waiting = max((place for place, op in enumerate(operations) if _waits(op.operation)), default=-1)
        if self.dependent:
            self.line("nvvm.griddepcontrol wait")
            if waiting < 0:
                self.line("nvvm.griddepcontrol launch_dependents")
        for position, op in self.in_order(operations):
            self.position = position
            self.lower(op)
            for last_use, area in [e for e in self.expiring if e[0] <= position]:
                self.expiring.remove((last_use, area))
                self.arena.release(area)
            if self.dependent and position == waiting:
                self.line("nvvm.griddepcontrol launch_dependents")
        arguments = ", ".join(f"{a.name}: {a.element}" for a in self.arguments)
        attributes = f"gpu.kernel, nvvm.kernel, nvvm.reqntid = array<i32: {self.threads}>"
        if self.min_blocks:
            attributes += f", nvvm.minctasm = {self.min_blocks} : i32"
        if self.dependent:
            attributes += ", nova_gpu.dependent"
        grid = ", ".join(map(str, self.grid))
        attributes += f", nova_gpu.grid = array<i64: {grid}>, nova_gpu.shared = {self.arena.total} : i64"
        return f"llvm.func @{self.name}({arguments}) attributes {{{attributes}}} {{\n{self.body()}\n}}"

    def buffer(self, op: Op) -> Buffer:
        """Allocates what an alloc_shared asks for."""
        kind = ir.MemRefType(op.results[0].type)
        (stages, rows, columns), element = kind.shape, str(kind.element_type)
        last_use = max((self._top_level(use.owner) for use in op.results[0].uses), default=self.position)
        offset = self.allocate(stages * rows * columns * element_bytes(element), last_use, 1024)
        return Buffer(self.shared(offset), offset, stages, rows, columns, element, op["swizzle"])

    def _top_level(self, operation: Any) -> int:
        """The position of the top-level op that holds `operation`."""
        operation = getattr(operation, "operation", operation)
        while operation.block != self.block:
            operation = operation.parent.operation
        return self._positions()[operation]

    def _positions(self) -> dict[Any, int]:
        found = self.__dict__.get("_position_table")
        if found is None:
            found = self._position_table = {op.operation: i for i, op in enumerate(self.block.operations)}
        return found


def _waits(operation: Any) -> bool:
    """Whether an op is a loop, or brings a loop's sums together, or holds such an op."""
    if operation.name in ("scf.for", "nova_tile.reduce_scatter"):
        return True
    return any(_waits(op.operation) for region in operation.regions for block in region.blocks for op in block)


def distribute(module: ir.Module, dependent: bool = False) -> str:
    """The level-5 text of a level-4 module: one kernel a function, in the same order.

    `dependent`: a launch may begin while the one before it ends, so each thread first waits for that one's results
    (griddepcontrol, PTX ISA 9.7.13.13, from sm_90), and after its last loop lets the next launch begin likewise:
    earlier, that one's blocks would only take up places, and all of them on the few SMs that are free first.

    Raises CompileError for an op without a lowering, or tiles whose layouts do not fit together.
    """
    for family in FAMILIES:
        importlib.import_module(family)
    functions, shared = [], False
    for op in module.body.operations:
        if op.operation.name == "func.func":
            thread = Distributor(op.operation, dependent)
            functions.append(thread.function())
            shared = shared or thread.arena.total > 0
    attributes = module.operation.attributes
    workspace = attribute_value(attributes["nova_tile.workspace"]) if "nova_tile.workspace" in attributes else 0
    if shared:
        functions.insert(0, SHARED_MEMORY)
    body = "\n".join(functions)
    return f"module attributes {{nova_gpu.workspace = {workspace} : i64}} {{\n{body}\n}}\n"


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """The pass: level 4 in, level 5 out."""
    from nova.schedule.annotate import target_of

    return ir.Module.parse(distribute(module, getattr(target_of(options), "dependent_launch", False)))
