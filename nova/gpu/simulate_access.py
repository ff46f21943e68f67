"""Memory operations of the simulator: loads and stores, cp.async, ldmatrix and stmatrix, barriers, atomics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nova.gpu import simulate_memory as memory
from nova.gpu import simulate_values as sv
from nova.gpu.simulate_memory import WARP, Access, Where
from nova.gpu.simulate_values import Array, Builder, Kind
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.gpu.simulate import Block, Compiler, Step

TABLE: dict[str, Builder] = {}
DYNAMIC = -(1 << 31)
GLOBAL, SHARED = 1, 3
REGISTER = np.int32


# --- what every access does ------------------------------------------------------------------------------------------


def read(s: Block, access: Access, space: int, dtype: Any, count: int) -> Array:
    """Loads [active threads, count] unsigned integers, checked and counted."""
    if space == SHARED:
        s.shared.note_read(access)
        s.count_shared("shared_load", access)
        return s.shared.read(access, dtype, count)
    s.count_global("global_load", access)
    return s.memory.load(access, dtype, count)


def write(s: Block, access: Access, space: int, values: Array) -> None:
    """Stores [active threads, count] unsigned integers, checked and counted."""
    if space == SHARED:
        s.shared.note_write(access)
        s.count_shared("shared_store", access)
        s.shared.write(access, values)
    else:
        s.count_global("global_store", access)
        s.memory.store(access, values)


def load_step(
    s: Block, where: Where, address: Array, space: int, kind: Kind, align: int, active: Array | None = None
) -> Array:
    """The value of a load of `kind` in all threads; zeros in those that do not take part."""
    count, width = max(kind.lanes, 1), kind.bytes
    access = s.access(where, address, width * count, align, active)
    bits = s.spread(read(s, access, space, kind.dtype, count), active)
    values = bits.view(kind.dtype) if kind.element != "i1" else bits != 0
    return values if kind.lanes else values[:, 0]


def store_step(
    s: Block, where: Where, value: Array, address: Array, space: int, align: int, active: Array | None = None
) -> None:
    rows = value if value.ndim > 1 else value[:, None]
    if rows.dtype == np.bool_:
        rows = rows.astype(np.uint8)
    rows = s.gathered(np.ascontiguousarray(rows).view(memory.view_dtype(rows.dtype.itemsize)), active)
    access = s.access(where, address, rows.shape[1] * rows.dtype.itemsize, align, active)
    write(s, access, space, rows)


# --- llvm.load, llvm.store, pointers ---------------------------------------------------------------------------------


def _alignment(op: ir.Operation, kind: Kind) -> int:
    """The alignment that the operation promises: its attribute, or the type's natural one."""
    if "alignment" in op.attributes:
        return int(op.attributes["alignment"].value)
    return kind.bytes * (1 << (max(kind.lanes, 1) - 1).bit_length())


def _load(c: Compiler, op: ir.Operation) -> Step:
    kind, space = c.kind(op.results[0]), c.kind(op.operands[0]).space
    source, result, align, where = c.slot(op.operands[0]), c.slot(op.results[0]), _alignment(op, kind), c.where(op)
    c.touches(space, kind.bytes * max(kind.lanes, 1), align)

    def step(s: Block) -> None:
        s.values[result] = load_step(s, where, s.values[source], space, kind, align)

    return step


def _store(c: Compiler, op: ir.Operation) -> Step:
    kind, space = c.kind(op.operands[0]), c.kind(op.operands[1]).space
    value, target = c.slots(op.operands)
    align, where = _alignment(op, kind), c.where(op)
    c.touches(space, kind.bytes * max(kind.lanes, 1), align)

    def step(s: Block) -> None:
        store_step(s, where, s.values[value], s.values[target], space, align)

    return step


def _strides(type_text: str, depth: int) -> list[int]:
    """Bytes that each of `depth` indices steps over, the first one over whole elements."""
    strides = [sv.size_of(type_text)]
    for _ in range(depth - 1):
        match = re.fullmatch(r"!?(?:llvm\.)?array<(\d+) x (.*)>", type_text) or re.fullmatch(
            r"vector<(\d+)x(.*)>", type_text
        )
        if match is None:
            raise NotImplementedError(f"getelementptr into {type_text}")
        type_text = match[2]
        strides.append(sv.size_of(type_text))
    return strides


def _getelementptr(c: Compiler, op: ir.Operation) -> Step:
    constants = [int(x) for x in op.attributes["rawConstantIndices"]]
    strides = _strides(str(op.attributes["elem_type"].value), len(constants))
    base, *dynamic = c.slots(op.operands)
    result = c.slot(op.results[0])
    offset = sum(i * stride for i, stride in zip(constants, strides, strict=True) if i != DYNAMIC)
    scaled = [stride for i, stride in zip(constants, strides, strict=True) if i == DYNAMIC]
    pairs = list(zip(dynamic, scaled, strict=True))

    def step(s: Block) -> None:
        address = s.values[base] + offset
        for slot, stride in pairs:
            address = address + s.values[slot].astype(np.int64) * stride
        s.values[result] = address

    return step


def _addressof(c: Compiler, op: ir.Operation) -> Step:
    name = str(op.attributes["global_name"].value)
    return c.preset(op, np.array([c.program.global_address(name)], np.int64))


# --- asynchronous copies ---------------------------------------------------------------------------------------------


def copy_step(
    s: Block,
    where: Where,
    target: Array,
    source: Array,
    size: int,
    source_size: Array | None,
    active: Array | None = None,
) -> None:
    """cp.async of `size` bytes, of which the first `source_size` are read and the others are zero."""
    s.count_copy(s.access(where, target, size, size, active))
    data = np.zeros((s.active_count(active), size), np.uint8)
    if source_size is None:
        data[:] = s.memory.load(s.counted_global(s.access(where, source, size, size, active)), np.uint8, size)
    else:
        amounts = s.gathered(source_size, active)
        addresses = s.gathered(source, active)
        threads = s.threads_of(active)
        for amount in np.unique(amounts):
            if not 0 <= int(amount) <= size:
                raise memory.SimulationError(f"{where}\n  expected a source size of 0 to {size}, got {int(amount)}")
            rows = np.flatnonzero(amounts == amount)
            if amount:
                access = Access(where, threads[rows], addresses[rows], int(amount), 1, s.block)
                data[rows, : int(amount)] = s.memory.load(s.counted_global(access), np.uint8, int(amount))
    s.shared.start_copy(s.access(where, target, size, size, active), data)


def _cp_async(c: Compiler, op: ir.Operation) -> Step:
    target, source, *rest = c.slots(op.operands)
    size, where = int(op.attributes["size"].value), c.where(op)
    c.touches(SHARED, size, size)
    c.touches(GLOBAL, size, size)

    def step(s: Block) -> None:
        amount = s.values[rest[0]] if rest else None
        copy_step(s, where, s.values[target], s.values[source], size, amount)

    return step


def _commit(c: Compiler, op: ir.Operation) -> Step:
    where = c.where(op)

    def step(s: Block) -> None:
        s.require_all(where)
        s.shared.commit()

    return step


def _wait(c: Compiler, op: ir.Operation) -> Step:
    pending, where = int(op.attributes["n"].value), c.where(op)

    def step(s: Block) -> None:
        s.require_all(where)
        s.shared.wait(pending)

    return step


def _barrier(c: Compiler, op: ir.Operation) -> Step:
    where = c.where(op)
    if len(op.operands):
        return _group_barrier(c, op)

    def step(s: Block) -> None:
        s.require_all(where)
        s.counters["barriers"] += 1
        s.shared.barrier()
        if s.memory.order is not None:
            s.memory.order.barrier()

    return step


def _group_barrier(c: Compiler, op: ir.Operation) -> Step:
    """nvvm.barrier with a number and a count: each group of neighbouring warps has a number of its own."""
    where = c.where(op)
    number, count = c.slots(op.operands)

    def step(s: Block) -> None:
        s.require_all(where)
        threads = int(np.max(s.values[count]))
        level = (threads // WARP).bit_length() - 1
        numbers = s.everywhere(s.values[number]).reshape(-1)
        groups = s.thread // threads
        apart = len(np.unique(numbers)) == len({*zip(numbers, groups, strict=True)}) == s.threads // threads
        if threads != WARP << level or not apart or numbers.min() < 1 or numbers.max() > 15:
            raise memory.SimulationError(f"{where}\n  expected a number of 1 to 15 for each {threads} neighbours")
        if not all(s.shared.meet(int(n), threads) for n in np.unique(numbers)):
            raise memory.SimulationError(f"{where}\n  groups of other than {threads} threads may be at this barrier")
        s.counters["group barriers"] += 1
        s.shared.group_barrier(level)

    return step


def _warp_barrier(c: Compiler, op: ir.Operation) -> Step:
    """nvvm.bar.warp.sync, of whole warps."""
    where = c.where(op)

    def step(s: Block) -> None:
        s.require_warps(where)
        s.counters["warp barriers"] += 1
        s.shared.group_barrier(0)

    return step


# --- ldmatrix, stmatrix: 8x8 matrices of 16-bit elements, a row of 16 bytes each -------------------------------------

_LANE = np.arange(WARP)


def _row_access(s: Block, where: Where, address: Array, number: int) -> Access:
    """The accesses of the threads that name rows: thread 8 m + r of each warp names row r of matrix m."""
    s.require_warps(where)
    access = s.access(where, address, 16, 16)
    naming = access.threads % WARP < 8 * number
    return Access(where, access.threads[naming], access.address[naming], 16, 16, s.block)


def ldmatrix_step(s: Block, where: Where, address: Array, number: int, transposed: bool) -> tuple[Array, ...]:
    """`number` registers of all threads."""
    access = _row_access(s, where, address, number)
    s.shared.note_read(access, whole_warp=True)
    s.count_shared("shared_load", access)
    rows = s.shared.read(access, np.uint16, 8).reshape(-1, number, 8, 8)  # warp, matrix, row, column
    if transposed:
        rows = rows.swapaxes(2, 3)
    pairs = np.ascontiguousarray(rows).view(np.int32)  # warp, matrix, row, pair of columns
    lanes = pairs[:, :, _LANE // 4, _LANE % 4]  # warp, matrix, lane
    return tuple(s.spread(np.ascontiguousarray(lanes[:, m]).reshape(-1)) for m in range(number))


def stmatrix_step(s: Block, where: Where, address: Array, registers: list[Array], transposed: bool) -> None:
    number = len(registers)
    access = _row_access(s, where, address, number)
    lanes = [s.gathered(r).reshape(-1, WARP) for r in registers]
    pairs = np.zeros((len(lanes[0]), number, 8, 4), np.int32)
    for m, register in enumerate(lanes):
        pairs[:, m, _LANE // 4, _LANE % 4] = register
    rows = pairs.view(np.uint16)
    if transposed:
        rows = rows.swapaxes(2, 3)
    s.shared.note_write(access)
    s.count_shared("shared_store", access)
    s.shared.write(access, np.ascontiguousarray(rows).reshape(-1, 8))


def _is_transposed(op: ir.Operation) -> bool:
    return "col" in str(op.attributes["layout"])


def _check_shape(op: ir.Operation, where: Where) -> None:
    shape = str(op.attributes["shape"]) if "shape" in op.attributes else "m = 8, n = 8"
    if "m = 8, n = 8" not in shape:
        raise NotImplementedError(f"the simulator has no {shape}: {where}")


def _ldmatrix(c: Compiler, op: ir.Operation) -> Step:
    (address,), (result,) = c.slots(op.operands), c.slots(op.results)
    number, transposed, where = int(op.attributes["num"].value), _is_transposed(op), c.where(op)
    _check_shape(op, where)
    c.touches(SHARED, 16, 16)

    def step(s: Block) -> None:
        registers = ldmatrix_step(s, where, s.values[address], number, transposed)
        s.values[result] = registers[0] if number == 1 else registers

    return step


def _stmatrix(c: Compiler, op: ir.Operation) -> Step:
    address, *sources = c.slots(op.operands)
    transposed, where = _is_transposed(op), c.where(op)
    _check_shape(op, where)
    c.touches(SHARED, 16, 16)

    def step(s: Block) -> None:
        stmatrix_step(s, where, s.values[address], [s.values[x] for x in sources], transposed)

    return step


# --- atomics ---------------------------------------------------------------------------------------------------------

_ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "fadd": np.add, "max": np.maximum, "min": np.minimum, "_and": np.bitwise_and, "_or": np.bitwise_or,
    "_xor": np.bitwise_xor, "xchg": lambda old, new: new, "fmax": np.fmax, "fmin": np.fmin,
}  # fmt: skip
_ATOMIC_KINDS = (
    "xchg", "add", "sub", "_and", "nand", "_or", "_xor", "max", "min", "umax", "umin", "fadd", "fsub", "fmax", "fmin",
)  # fmt: skip


def atomic_step(s: Block, where: Where, name: str, address: Array, value: Array, kind: Kind) -> Array:
    access = s.access(where, address, kind.bytes, kind.bytes)
    s.count_global("global_store", access)
    old = s.memory.update(access, s.gathered(value), kind.dtype, _ATOMIC[name])
    return s.spread(old)


def _atomicrmw(c: Compiler, op: ir.Operation) -> Step:
    address, value = c.slots(op.operands)
    (result,) = c.slots(op.results)
    kind, where = c.kind(op.operands[1]), c.where(op)
    if c.kind(op.operands[0]).space == SHARED:
        raise NotImplementedError(f"the simulator has no atomics on shared memory: {where}")
    name = _ATOMIC_KINDS[int(op.attributes["bin_op"].value)]

    def step(s: Block) -> None:
        s.values[result] = atomic_step(s, where, name, s.values[address], s.values[value], kind)

    return step


def _cmpxchg(c: Compiler, op: ir.Operation) -> Step:
    address, expected, value = c.slots(op.operands)
    (result,) = c.slots(op.results)
    kind, where = c.kind(op.operands[1]), c.where(op)

    def step(s: Block) -> None:
        access = s.access(where, s.values[address], kind.bytes, kind.bytes)
        pairs = np.stack([s.gathered(s.values[expected]), s.gathered(s.values[value])], axis=1)
        swap = lambda old, pair: np.where(old == pair[:, 0], pair[:, 1], old)  # noqa: E731
        old = s.memory.update(access, pairs, kind.dtype, swap)
        s.values[result] = (s.spread(old), s.spread(old == pairs[:, 0]))

    return step


def _nothing(c: Compiler, op: ir.Operation) -> Step:
    return lambda s: None


TABLE |= {
    "llvm.load": _load, "llvm.store": _store, "llvm.getelementptr": _getelementptr, "llvm.mlir.addressof": _addressof,
    "nvvm.cp.async.shared.global": _cp_async, "nvvm.cp.async.commit.group": _commit,
    "nvvm.cp.async.wait.group": _wait, "nvvm.barrier": _barrier, "nvvm.ldmatrix": _ldmatrix,
    "nvvm.stmatrix": _stmatrix, "llvm.atomicrmw": _atomicrmw, "llvm.cmpxchg": _cmpxchg,
    "nvvm.memory.barrier": _nothing, "llvm.fence": _nothing, "nvvm.prefetch": _nothing,
    "nvvm.griddepcontrol": _nothing, "llvm.intr.assume": _nothing, "nvvm.bar.warp.sync": _warp_barrier,
}  # fmt: skip
