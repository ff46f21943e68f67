"""Runs tile programs on NumPy, a block at a time: what level 4 means, without any distribution.

    run(module_text([program]), [x, y, workspace])        # flat arrays; bfloat16 memory is uint16

A tile is an array of its shape, a scalar a NumPy scalar, a shared buffer an array of [stages, rows, columns] that
starts as garbage. bfloat16 values are float32 arrays rounded to it. Accesses outside a buffer are errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nova import mlir
from nova.errors import CompileError
from nova.mlir import ir
from nova.tile import interpret_arith as arith_ops
from nova.tile.text import BITS

Handler = Callable[["Block", ir.Operation], Any]
HANDLERS: dict[str, Handler] = {}


def handles(name: str) -> Callable[[Handler], Handler]:
    """Registers the meaning of an op: a function of (block, op) that returns its result, or a tuple of results."""

    def register(function: Handler) -> Handler:
        HANDLERS[name] = function
        return function

    return register


def run(
    text: str, buffers: Sequence[np.ndarray | None], blocks: Callable[[int], bool] | None = None,
    memory: Sequence[np.ndarray] = (),
) -> None:  # fmt: skip
    """Runs all launches of a kernel in order over its `buffers` (one an argument), in place.

    `blocks`, if given, says which linear block numbers to run. `memory`: the arrays to which addresses in tables of
    pointers may point.
    """
    module = mlir.parse(text)
    with mlir.context(), np.errstate(all="ignore"):
        for function in module.body.operations:
            if function.operation.name == "func.func":
                _launch(function.operation, buffers, blocks, memory)


def _launch(
    function: ir.Operation, buffers: Sequence[Any], blocks: Callable[[int], bool] | None, memory: Sequence[np.ndarray]
) -> None:
    grid = list(ir.DenseI64ArrayAttr(function.attributes["nova_tile.grid"]))
    number = 0
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                if blocks is None or blocks(number):
                    Block(function, buffers, (x, y, z), memory).run()
                number += 1


class Block:
    """The state of one block: SSA values by name of the value."""

    def __init__(
        self, function: ir.Operation, buffers: Sequence[Any], place: tuple[int, int, int],
        memory: Sequence[np.ndarray] = (),
    ):  # fmt: skip
        self.function, self.place, self.memory = function, place, memory
        entry = function.regions[0].blocks[0]
        self.values: dict[ir.Value, Any] = {}
        for argument, buffer in zip(entry.arguments, buffers, strict=False):
            self.values[argument] = None if buffer is None else buffer.reshape(-1)
        self.entry = entry

    def run(self) -> None:
        with contextlib.suppress(_Left):
            self.block(self.entry)

    def block(self, block: ir.Block) -> list[Any]:
        """Runs the ops of a block; returns what its terminator yields."""
        for view in block.operations:
            op = view.operation
            if op.name in ("scf.yield", "func.return"):
                return [self.values[v] for v in op.operands]
            handler = HANDLERS.get(op.name) or arith_ops.HANDLERS.get(op.name)
            if handler is None:
                raise CompileError(f"the tile interpreter has no meaning for {op.name}")
            found = handler(self, op)
            results = list(op.results)
            if len(results) == 1 and not isinstance(found, list):  # regions give lists
                found = (found,)
            for result, value in zip(results, found or (), strict=True):
                self.values[result] = value
        return []

    def at(self, address: int) -> np.ndarray:
        """The bytes from a real address on, as tables hold them; none if it is in no known array."""
        for array in self.memory:
            start = array.ctypes.data
            if start <= address < start + array.nbytes:
                return array.reshape(-1).view(np.uint8)[address - start :]
        return np.zeros(0, np.uint8)

    def operands(self, op: ir.Operation) -> list[Any]:
        return [self.values[v] for v in op.operands]


def ints(op: ir.Operation, name: str) -> tuple[int, ...]:
    return tuple(ir.DenseI64ArrayAttr(op.attributes[name]))


def element_of(value: ir.Value) -> str:
    """The element type of a tile or scalar, as text."""
    return str(value.type.element_type) if isinstance(value.type, ir.ShapedType) else str(value.type)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    return tuple(ir.VectorType(value.type).shape) if isinstance(value.type, ir.VectorType) else ()


# --- control flow -----------------------------------------------------------------------------------------------------


@handles("scf.for")
def _for(b: Block, op: ir.Operation) -> list[Any]:
    low, high, step, *carried = b.operands(op)
    body = op.regions[0].blocks[0]
    for i in range(int(low), int(high), int(step)):
        for argument, value in zip(body.arguments, [np.int32(i), *carried], strict=True):
            b.values[argument] = value
        carried = b.block(body)
    return carried


@handles("scf.if")
def _if(b: Block, op: ir.Operation) -> list[Any]:
    region = op.regions[0 if b.values[op.operands[0]] else 1]
    return b.block(region.blocks[0]) if len(region.blocks) else []


# --- memory -----------------------------------------------------------------------------------------------------------


def typed(buffer: np.ndarray, element: str) -> np.ndarray:
    """A buffer as elements of a type's size: parts of a workspace hold different types."""
    bytes_ = max(BITS[element], 8) // 8
    if buffer.itemsize == bytes_:
        return buffer
    raw = buffer.view(np.uint8)
    return raw[: raw.size // bytes_ * bytes_].view(arith_ops.memory_dtype(element))


def read(buffer: np.ndarray, address: np.ndarray, element: str) -> np.ndarray:
    """The elements at `address`, as values."""
    return arith_ops.from_memory(buffer[address], element)


def write(buffer: np.ndarray, address: Any, values: np.ndarray, element: str) -> None:
    """Stores values at `address`, whatever type of the element's size the buffer is declared with."""
    stored = np.asarray(arith_ops.to_memory(values, element))
    buffer[address] = stored.view(buffer.dtype) if stored.itemsize == buffer.itemsize else stored


def window(op: ir.Operation, offsets: Sequence[Any], base: Any, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(addresses, which are within the extents) of an access to a tile of `shape`."""
    strides, extents = ints(op, "strides"), ints(op, "extents")
    address, inside = np.full(shape, int(base), np.int64), np.ones(shape, bool)
    for d, (offset, stride, extent) in enumerate(zip(offsets, strides, extents, strict=True)):
        own = np.arange(shape[d]).reshape([-1 if k == d else 1 for k in range(len(shape))]) + int(offset)
        address = address + own * stride
        if extent >= 0:
            inside = inside & (own < extent)
    return address, inside


def checked(b: Block, op: ir.Operation, buffer: np.ndarray, address: np.ndarray) -> np.ndarray:
    """`address`, if all of it is inside the buffer."""
    if address.size and (address.min() < 0 or address.max() >= buffer.size):
        wrong = address[(address < 0) | (address >= buffer.size)][0]
        name = ir.StringAttr(b.function.attributes["sym_name"]).value
        raise IndexError(
            f"@{name} block {b.place}: {op.name} touches element {wrong} of a buffer of {buffer.size}\n{op}"
        )
    return address


@handles("nova_tile.program_id")
def _program_id(b: Block, op: ir.Operation) -> Any:
    return np.int32(b.place[op.attributes["axis"].value])


@handles("nova_tile.load")
def _load(b: Block, op: ir.Operation) -> np.ndarray:
    buffer, base, *offsets = b.operands(op)
    element, shape = element_of(op.results[0]), shape_of(op.results[0])
    buffer = typed(buffer, element)
    address, inside = window(op, offsets, base, shape)
    tile = np.full(shape, arith_ops.constant(op.attributes["fill"], element), arith_ops.dtype(element))
    tile[inside] = read(buffer, checked(b, op, buffer, address[inside]), element)
    return tile


@handles("nova_tile.store")
def _store(b: Block, op: ir.Operation) -> None:
    tile, buffer, base, *offsets = b.operands(op)
    element = element_of(op.operands[0])
    buffer = typed(buffer, element)
    address, inside = window(op, offsets, base, shape_of(op.operands[0]))
    write(buffer, checked(b, op, buffer, address[inside]), tile[inside], element)


@handles("nova_tile.gather")
def _gather(b: Block, op: ir.Operation) -> np.ndarray:
    buffer, index, *mask = b.operands(op)
    element = element_of(op.results[0])
    buffer = typed(buffer, element)
    address, inside = _runs(op, index, mask)
    tile = np.full(index.shape, arith_ops.constant(op.attributes["fill"], element), arith_ops.dtype(element))
    tile[inside] = read(buffer, checked(b, op, buffer, address[inside]), element)
    return tile


@handles("nova_tile.scatter")
def _scatter(b: Block, op: ir.Operation) -> None:
    tile, buffer, index, *mask = b.operands(op)
    element = element_of(op.operands[0])
    buffer = typed(buffer, element)
    address, inside = _runs(op, index, mask)
    write(buffer, checked(b, op, buffer, address[inside]), tile[inside], element)


def _runs(op: ir.Operation, index: np.ndarray, mask: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and mask of a gather: with `vector`, the first of each run of elements stands for all."""
    vector = op.attributes["vector"].value
    address = index.astype(np.int64)
    inside = mask[0] if mask else np.ones(index.shape, bool)
    if vector > 1:
        cut = (*index.shape[:-1], -1, vector)
        address = (address.reshape(cut)[..., :1] + np.arange(vector)).reshape(index.shape)
        inside = np.broadcast_to(inside.reshape(cut)[..., :1], inside.reshape(cut).shape).reshape(index.shape)
    return address, inside


# --- scalars in memory, pointers --------------------------------------------------------------------------------------


@handles("nova_tile.load_scalar")
def _load_scalar(b: Block, op: ir.Operation) -> Any:
    buffer, index = b.operands(op)
    element = element_of(op.results[0])
    buffer = typed(buffer, element)
    return read(buffer, checked(b, op, buffer, np.array([int(index)])), element)[0]


@handles("nova_tile.store_scalar")
def _store_scalar(b: Block, op: ir.Operation) -> None:
    value, buffer, index = b.operands(op)
    element = element_of(op.operands[0])
    buffer = typed(buffer, element)
    write(buffer, checked(b, op, buffer, np.array([int(index)])), np.asarray(value).reshape(1), element)


@handles("nova_tile.load_pointer")
def _load_pointer(b: Block, op: ir.Operation) -> np.ndarray:
    table, index = b.operands(op)
    return b.at(int(typed(table, "i64").view(np.int64)[int(index)]))


@handles("nova_tile.advance")
def _advance(b: Block, op: ir.Operation) -> np.ndarray:
    buffer, offset = b.operands(op)
    return buffer.view(np.uint8)[int(offset) * op.attributes["bytes"].value :]


@handles("nova_tile.address")
def _address(b: Block, op: ir.Operation) -> np.int64:
    return np.int64(b.operands(op)[0].ctypes.data)


# --- tiles ------------------------------------------------------------------------------------------------------------


@handles("nova_tile.iota")
def _iota(b: Block, op: ir.Operation) -> np.ndarray:
    shape, dim = shape_of(op.results[0]), op.attributes["dim"].value
    return np.broadcast_to(
        np.arange(shape[dim], dtype=np.int32).reshape([-1 if k == dim else 1 for k in range(len(shape))]), shape
    )


@handles("nova_tile.splat")
@handles("vector.broadcast")
def _splat(b: Block, op: ir.Operation) -> np.ndarray:
    return np.broadcast_to(b.values[op.operands[0]], shape_of(op.results[0]))


@handles("nova_tile.reduce")
@handles("nova_tile.reduce_scatter")
def _reduce(b: Block, op: ir.Operation) -> Any:
    tile, kind = b.values[op.operands[0]], op.attributes["kind"].value
    return arith_ops.reduce(tile, kind, ints(op, "dims"), element_of(op.results[0]))


@handles("nova_tile.scan")
def _scan(b: Block, op: ir.Operation) -> np.ndarray:
    tile, kind, dim = b.values[op.operands[0]], op.attributes["kind"].value, op.attributes["dim"].value
    return arith_ops.scan(tile, kind, dim, element_of(op.results[0]))


@handles("nova_tile.expand")
def _expand(b: Block, op: ir.Operation) -> np.ndarray:
    return np.broadcast_to(np.expand_dims(b.values[op.operands[0]], ints(op, "dims")), shape_of(op.results[0]))


@handles("nova_tile.to_layout")
def _to_layout(b: Block, op: ir.Operation) -> np.ndarray:
    return b.values[op.operands[0]]


@handles("nova_tile.transpose")
def _transpose(b: Block, op: ir.Operation) -> np.ndarray:
    return b.values[op.operands[0]].transpose(ints(op, "permutation"))


@handles("nova_tile.check")
def _check(b: Block, op: ir.Operation) -> None:
    bad, value, record = b.operands(op)
    bad, value = np.atleast_1d(bad), np.atleast_1d(value)
    words = record.view(np.int64)
    if bad.any() and not words[0]:
        words[:2] = 1, np.broadcast_to(value, bad.shape)[bad][0]
        if words.size > 2 and words[2]:
            b.at(int(words[2])).view(np.int64)[0] = 1


class _Left(Exception):
    """A guard ended the program of a block."""


@handles("nova_tile.guard")
def _guard(b: Block, op: ir.Operation) -> None:
    if b.values[op.operands[0]].view(np.int64)[0]:
        raise _Left


@handles("nova_tile.round_tf32")
def _round_tf32(b: Block, op: ir.Operation) -> np.ndarray:
    return arith_ops.round_tf32(b.values[op.operands[0]])


# --- shared memory and tensor cores -----------------------------------------------------------------------------------


@handles("nova_tile.alloc_shared")
def _alloc_shared(b: Block, op: ir.Operation) -> np.ndarray:
    type_ = ir.MemRefType(op.results[0].type)
    kind = arith_ops.dtype(str(type_.element_type))
    return np.full(type_.shape, np.nan if np.issubdtype(kind, np.floating) else 85, kind)


@handles("nova_tile.async_copy")
def _async_copy(b: Block, op: ir.Operation) -> None:
    buffer, shared, stage, base, *offsets = b.operands(op)
    element = str(ir.MemRefType(op.operands[1].type).element_type)
    address, inside = window(op, offsets, base, shared.shape[1:])
    tile = np.zeros(shared.shape[1:], shared.dtype)
    tile[inside] = read(buffer, checked(b, op, buffer, address[inside]), element)
    shared[int(stage)] = tile


@handles("nova_tile.async_commit")
@handles("nova_tile.async_wait")
@handles("nova_tile.barrier")
def _order(b: Block, op: ir.Operation) -> None:
    return None


def _part(b: Block, op: ir.Operation, operands: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """The view of a stage that a tile of `shape` stands for."""
    shared, stage, row, column = operands
    rows, columns = shape[::-1] if op.attributes["transposed"].value else shape
    part = shared[int(stage), int(row) : int(row) + rows, int(column) : int(column) + columns]
    if part.shape != (rows, columns):
        raise IndexError(f"{op.name} reaches outside of its stage of {shared.shape[1:]}: {op}")
    return part.T if op.attributes["transposed"].value else part


@handles("nova_tile.load_shared")
def _load_shared(b: Block, op: ir.Operation) -> np.ndarray:
    return _part(b, op, b.operands(op), shape_of(op.results[0])).copy()


@handles("nova_tile.store_shared")
def _store_shared(b: Block, op: ir.Operation) -> None:
    tile, *place = b.operands(op)
    _part(b, op, place, tile.shape)[...] = tile


@handles("nova_tile.mma")
def _mma(b: Block, op: ir.Operation) -> np.ndarray:
    x, y, c = b.operands(op)
    if "TF32" in op.attributes["intrinsic"].value:
        x, y = arith_ops.truncate_tf32(x), arith_ops.truncate_tf32(y)
    wide = np.float64 if c.dtype == np.float64 else np.float32
    return (c + x.astype(wide) @ y.astype(wide)).astype(c.dtype)
