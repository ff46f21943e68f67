"""Small builders shared by the CPU emitters: constants, loops, buffers made from bare pointers.

Emitters write memref/vector/scf. A buffer enters as a bare pointer, so its descriptor is built in place: the
`unrealized_conversion_cast` from the descriptor struct is what `convert-to-llvm` itself would create for a memref.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nova.mlir import arith, ir, llvm, scf

DYNAMIC = ir.ShapedType.get_dynamic_stride_or_offset()


def index(value: int) -> ir.Value:
    return arith.ConstantOp(ir.IndexType.get(), value).result


def i64(value: int) -> ir.Value:
    return arith.ConstantOp(ir.IntegerType.get_signless(64), value).result


def i32(value: int) -> ir.Value:
    return arith.ConstantOp(ir.IntegerType.get_signless(32), value).result


def pointer_type() -> ir.Type:
    return ir.Type.parse("!llvm.ptr")


def to_i64(value: ir.Value) -> ir.Value:
    return arith.IndexCastOp(ir.IntegerType.get_signless(64), value).result


def to_index(value: ir.Value) -> ir.Value:
    return arith.IndexCastOp(ir.IndexType.get(), value).result


@contextmanager
def loop(begin: ir.Value | int, end: ir.Value | int, step: ir.Value | int = 1) -> Iterator[ir.Value]:
    """`with loop(0, n) as i:` - an scf.for without results."""
    bounds = [index(bound) if isinstance(bound, int) else bound for bound in (begin, end, step)]
    op = scf.ForOp(*bounds)
    with ir.InsertionPoint(op.body):
        yield op.induction_variable
        scf.YieldOp([])


def loop_carrying(
    begin: ir.Value | int,
    end: ir.Value | int,
    step: ir.Value | int,
    inits: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """An scf.for whose `body(i, carried)` returns the next carried values; returns the final ones."""
    bounds = [index(bound) if isinstance(bound, int) else bound for bound in (begin, end, step)]
    op = scf.ForOp(*bounds, list(inits))
    with ir.InsertionPoint(op.body):
        scf.YieldOp(list(body(op.induction_variable, list(op.inner_iter_args))))
    return list(op.results)


@contextmanager
def if_then(condition: ir.Value) -> Iterator[None]:
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def storage_type(element: ir.Type) -> ir.Type:
    """The type of an element in memory: booleans are bytes, integers carry no sign."""
    if isinstance(element, ir.IntegerType):
        return ir.IntegerType.get_signless(max(8, element.width))
    return element


def memref_of(type_: ir.Type) -> ir.MemRefType:
    """The dense memref that holds a tensor (or scalar) type."""
    if isinstance(type_, ir.MemRefType):
        return type_
    if isinstance(type_, ir.RankedTensorType):
        return ir.MemRefType.get(type_.shape, storage_type(type_.element_type))
    return ir.MemRefType.get([], storage_type(type_))


def element_bytes(element: ir.Type) -> int:
    if isinstance(element, ir.ComplexType):
        return 2 * element_bytes(element.element_type)
    return (element.width + 7) // 8


def size_bytes(type_: ir.MemRefType) -> int:
    count = 1
    for extent in type_.shape:
        count *= extent
    return count * element_bytes(type_.element_type)


def offset_pointer(pointer: ir.Value, byte_offset: ir.Value | int) -> ir.Value:
    """`pointer + byte_offset` (an index value or a Python int)."""
    i8 = ir.IntegerType.get_signless(8)
    if isinstance(byte_offset, int):
        if byte_offset == 0:
            return pointer
        byte_offset = i64(byte_offset)
    elif isinstance(byte_offset.type, ir.IndexType):
        byte_offset = to_i64(byte_offset)
    return llvm.GEPOp(pointer_type(), pointer, [byte_offset], [-(1 << 31)], i8, None).result


def memref_from_pointer(pointer: ir.Value, type_: ir.MemRefType) -> ir.Value:
    """A memref of static shape and static strides over the memory at `pointer`."""
    shape = list(type_.shape)
    strides, offset = type_.get_strides_and_offset()
    rank = len(shape)
    arrays = f", array<{rank} x i64>, array<{rank} x i64>" if rank else ""
    struct = ir.Type.parse(f"!llvm.struct<(ptr, ptr, i64{arrays})>")
    value = llvm.UndefOp(struct).result

    def put(value: ir.Value, item: ir.Value, position: list[int]) -> ir.Value:
        return llvm.InsertValueOp(value, item, ir.DenseI64ArrayAttr.get(position)).result

    value = put(put(value, pointer, [0]), pointer, [1])
    value = put(value, i64(offset), [2])
    for axis in range(rank):
        value = put(value, i64(shape[axis]), [3, axis])
        value = put(value, i64(strides[axis]), [4, axis])
    return ir.Operation.create("builtin.unrealized_conversion_cast", results=[type_], operands=[value]).result
