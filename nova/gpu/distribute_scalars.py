"""Scalars in memory, the same for all threads of a block: parameters, partial results, tables of pointers."""

from __future__ import annotations

from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.registers import memory_element
from nova.tile.text import Value

_BY_BYTES = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


@lowers("nova_tile.load_scalar")
def load_scalar(it: Distributor, op: Op) -> None:
    pointer, index = it.scalar_of(op.operands[0]), it.number_of(op.operands[1])
    element = str(op.results[0].type)
    loaded = it.load(it.offset(pointer, index, element), memory_element(element))
    if element == "i1":
        loaded = it.compare("ne", loaded, 0)
    it.set(op.results[0], loaded)


@lowers("nova_tile.store_scalar")
def store_scalar(it: Distributor, op: Op) -> None:
    """By the first thread."""
    value, pointer, index = it.scalar_of(op.operands[0]), it.scalar_of(op.operands[1]), it.number_of(op.operands[2])
    first = it.once("first thread", lambda: it.compare("eq", it.tid(), 0))
    vector = it.from_elements([value])
    if value.element == "i1":
        vector = it.convert("arith.extui", vector, "i8")
    (words,) = it.words(vector, 1)
    it.store_where(first, words, it.offset(pointer, index, value.element), 0, vector.element, 1)


@lowers("nova_tile.load_pointer")
def load_pointer(it: Distributor, op: Op) -> None:
    table, index = it.scalar_of(op.operands[0]), it.number_of(op.operands[1])
    word = it.offset(table, index, "i64")
    kind = str(op.results[0].type)
    it.set(op.results[0], it.result(f"llvm.load {word.name} {{alignment = 8 : i64}} : {word.element} -> {kind}", kind))


@lowers("nova_tile.advance")
def advance(it: Distributor, op: Op) -> None:
    pointer, by, size = it.scalar_of(op.operands[0]), it.number_of(op.operands[1]), op["bytes"]
    if size in _BY_BYTES:
        it.set(op.results[0], it.offset(pointer, by, _BY_BYTES[size]))
    else:
        it.set(op.results[0], it.offset(pointer, it.mul(it.cast(by, "i64"), size), "i8"))


@lowers("nova_tile.address")
def address(it: Distributor, op: Op) -> None:
    pointer = it.scalar_of(op.operands[0])
    made: Value = it.result(f"llvm.ptrtoint {pointer.name} : {pointer.element} to i64", "i64")
    it.set(op.results[0], made)
