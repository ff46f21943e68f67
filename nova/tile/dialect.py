"""The `nova_tile` dialect: what a block does with tiles, beside arith, math and scf on `vector` values.

    %x = "nova_tile.load"(%arg0, %base, %row, %c0) {strides = .., extents = .., layout = ..} -> vector<8x768xf32>

A tile is a value of type `vector<d0 x .. x T>` that the threads of a block hold together; the layout says who holds
what. Ops that make a layout carry it; elementwise arith and math ops pass it on. Anything else in a program is the same
for all threads. Shared memory is `memref<stages x rows x columns x T, 3>`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nova import mlir
from nova.mlir import ext, ir
from nova.tile.layout import NestedLayout


class NovaTile(ext.Dialect, name="nova_tile"):  # type: ignore[call-arg]  # the bindings are untyped
    """Block-level programs over tiles with layouts."""


class VerifyError(Exception):
    """Raised by a verifier; becomes a diagnostic at the op's location."""


@dataclass(frozen=True)
class OpSpec:
    """The declaration of one op. `variadic`: the last operand group, whose values all have one type."""

    name: str
    operands: tuple[str, ...]
    variadic: str | None
    results: int
    attrs: dict[str, str]
    verify: Callable[[Instance], None]
    doc: str


REGISTRY: dict[str, OpSpec] = {}
KINDS: dict[str, tuple[type, ...]] = {
    "int": (ir.IntegerAttr,), "bool": (ir.BoolAttr,), "str": (ir.StringAttr,), "ints": (ir.DenseI64ArrayAttr,),
    "num": (ir.FloatAttr, ir.IntegerAttr, ir.BoolAttr), "layout": (ir.DictAttr,),
}  # fmt: skip


class Instance:
    """What a verifier sees of an op."""

    def __init__(self, spec: OpSpec, operation: Any):
        self.spec, self.operation = spec, operation
        self.operands, self.results = list(operation.operands), list(operation.results)

    def __getitem__(self, name: str) -> Any:
        attribute = self.operation.attributes[name]
        if self.spec.attrs[name] == "layout":
            return NestedLayout.parse(attribute)
        if self.spec.attrs[name] == "ints":
            return tuple(ir.DenseI64ArrayAttr(attribute))
        return attribute.value

    def shape(self, value: Any) -> tuple[int, ...]:
        """Of a tile; () of a scalar."""
        return tuple(ir.VectorType(value.type).shape) if is_tile(value) else ()


def is_tile(value: Any) -> bool:
    return isinstance(value.type, ir.VectorType)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyError(message)


def op(name: str, operands: str = "", results: int = 1, attrs: str = "") -> Callable[[Any], Any]:
    """Declares `nova_tile.<name>`; the decorated function is the verifier, its docstring the definition."""

    def declare(verify: Callable[[Instance], None]) -> Callable[[Instance], None]:
        names = operands.split()
        variadic = names.pop()[1:] if names and names[-1].startswith("*") else None
        kinds = dict(item.split(":") for item in attrs.split())
        spec = OpSpec(name, tuple(names), variadic, results, kinds, verify, verify.__doc__ or "")
        REGISTRY[name] = spec
        _make_class(spec)
        return verify

    return declare


def _make_class(spec: OpSpec) -> None:
    def verify_invariants(operation: Any) -> bool:
        try:
            for key, kind in spec.attrs.items():
                check(key in operation.attributes, f"attribute {key} is missing")
                found = operation.attributes[key]
                check(isinstance(found, KINDS[kind]), f"attribute {key} must be of kind {kind}, got {found}")
            spec.verify(Instance(spec, operation))
        except (VerifyError, ValueError, IndexError) as error:
            operation.location.emit_error(f"nova_tile.{spec.name}: {error}")
            return False
        return True

    def body(namespace: dict[str, Any]) -> None:
        annotations: dict[str, Any] = dict.fromkeys(spec.operands, ext.Operand[Any])
        if spec.variadic:
            annotations[spec.variadic] = Sequence[ext.Operand[Any]]
        annotations.update(dict.fromkeys((f"attr_{a}" if a in annotations else a for a in spec.attrs), Any))
        annotations.update({f"result_{i}": ext.Result[Any] for i in range(spec.results)})
        namespace["__annotations__"] = annotations
        namespace["__doc__"] = spec.doc
        namespace["verify_invariants"] = staticmethod(verify_invariants)

    class_name = "".join(part.capitalize() for part in spec.name.split("_")) + "Op"
    types.new_class(class_name, (NovaTile.Operation,), {"name": spec.name}, body)


def load() -> None:
    """Loads the dialect into the current context."""
    mlir.stand_in_for_bindings("nova_tile")
    NovaTile.load()


# --- shared checks ----------------------------------------------------------------------------------------------------


def _check_layout(it: Instance, layout: NestedLayout, value: Any) -> None:
    check(layout.shape == it.shape(value), f"layout of {list(layout.shape)} for a tile of {list(it.shape(value))}")


def _check_window(it: Instance, rank: int, first_offset: int) -> None:
    """strides, extents and offsets of an access to a tile of `rank` dimensions."""
    offsets = len(it.operands) - first_offset
    for what, count in (("strides", len(it["strides"])), ("extents", len(it["extents"])), ("offsets", offsets)):
        check(count == rank, f"{count} {what} for a tile of rank {rank}")


def _check_vector(it: Instance, layout: NestedLayout) -> None:
    vector, strides = it["vector"], it["strides"]
    if vector == 1:
        return
    runs = [d for d in range(layout.rank) if strides[d] == 1 and layout.element[d] % vector == 0]
    check(bool(runs), f"vector {vector}: no dimension of stride 1 holds runs of it in {layout.text()}")
    extent = it["extents"][runs[-1]]
    check(extent < 0 or extent % vector == 0, f"vector {vector} does not divide the extent {extent}")


# --- memory -----------------------------------------------------------------------------------------------------------


@op("program_id", attrs="axis:int")
def _program_id(it: Instance) -> None:
    """The block's coordinate along grid axis 0, 1 or 2: i32."""
    check(0 <= it["axis"] <= 2, f"axis {it['axis']}")


@op("load", "ptr base *offsets", attrs="strides:ints extents:ints vector:int fill:num layout:layout wide:bool")
def _load(it: Instance) -> None:
    """Element i of the tile is ptr[base + sum((offset[d] + i[d]) * strides[d])], or `fill` where offset[d] + i[d] is
    not below extents[d] (-1: always below). `vector`: elements one access may move; `wide`: offsets need 64 bits."""
    tile = it.results[0]
    _check_layout(it, it["layout"], tile)
    _check_window(it, it["layout"].rank, 2)
    _check_vector(it, it["layout"])


@op("store", "tile ptr base *offsets", results=0,
    attrs="strides:ints extents:ints vector:int layout:layout wide:bool")  # fmt: skip
def _store(it: Instance) -> None:
    """The inverse of load: elements within the extents are written, by the first of the threads that hold a copy."""
    _check_layout(it, it["layout"], it.operands[0])
    _check_window(it, it["layout"].rank, 3)
    _check_vector(it, it["layout"])


@op("gather", "ptr index *mask", attrs="vector:int fill:num layout:layout")
def _gather(it: Instance) -> None:
    """ptr[index[i]] for every element i (where mask[i]; else `fill`). With `vector` n, runs of n registers along the
    last dimension are neighbours in memory, and the first one's index and mask stand for all."""
    _check_layout(it, it["layout"], it.results[0])
    check(it.shape(it.operands[1]) == it.shape(it.results[0]), "an index for each element is needed")
    check(it["layout"].element[-1] % it["vector"] == 0, f"vector {it['vector']} cuts runs of {it['layout'].element}")


@op("scatter", "tile ptr index *mask", results=0, attrs="vector:int layout:layout")
def _scatter(it: Instance) -> None:
    """ptr[index[i]] = tile[i] (where mask[i]), by the first of the threads that hold a copy."""
    _check_layout(it, it["layout"], it.operands[0])
    check(it["layout"].element[-1] % it["vector"] == 0, f"vector {it['vector']} cuts runs of {it['layout'].element}")


@op("load_scalar", "ptr index")
def _load_scalar(it: Instance) -> None:
    """ptr[index]: one element, the same in all threads. i1 is a byte in memory."""
    check(not is_tile(it.results[0]), "the result is a scalar")


@op("store_scalar", "value ptr index", results=0)
def _store_scalar(it: Instance) -> None:
    """ptr[index] = value, by one thread of the block."""
    check(not is_tile(it.operands[0]), "the value is a scalar")


@op("load_pointer", "table index")
def _load_pointer(it: Instance) -> None:
    """The pointer in word `index` of a table of 64-bit words, the same in all threads."""
    check(str(it.results[0].type) == "!llvm.ptr<1>", "the result is !llvm.ptr<1>")


@op("advance", "ptr offset", attrs="bytes:int")
def _advance(it: Instance) -> None:
    """The pointer `offset` elements of `bytes` bytes further."""
    check(it["bytes"] > 0, "an element has a positive size")


@op("address", "ptr")
def _address(it: Instance) -> None:
    """The pointer as i64."""
    check(str(it.results[0].type) == "i64", "the result is i64")


# --- tiles ------------------------------------------------------------------------------------------------------------


@op("splat", "value", attrs="layout:layout")
def _splat(it: Instance) -> None:
    """A tile whose elements are all `value`, held in a layout: what a loop may carry. Elsewhere `vector.broadcast` of a
    scalar will do, which fits any layout."""
    _check_layout(it, it["layout"], it.results[0])


@op("iota", attrs="dim:int layout:layout")
def _iota(it: Instance) -> None:
    """Each element's own index along `dim`."""
    _check_layout(it, it["layout"], it.results[0])


REDUCTIONS = (
    "addf", "mulf", "maximumf", "minimumf", "maxnumf", "minnumf", "addi", "muli", "maxsi", "minsi", "maxui", "minui",
    "andi", "ori", "xori",
)  # fmt: skip


@op("reduce", "tile", attrs="dims:ints kind:str layout:layout")
def _reduce(it: Instance) -> None:
    """Combines along `dims` with arith.<kind>, in a fixed order: a thread's registers, then lanes, then warps. `layout`
    is the operand's; the result's is that without `dims`. All dims: a scalar, the same in every thread."""
    _check_reduced(it, it["layout"])


def _check_reduced(it: Instance, layout: NestedLayout) -> None:
    """A reduction of an operand that is held in `layout`."""
    check(it["kind"] in REDUCTIONS, f"kind {it['kind']!r}; known: {', '.join(REDUCTIONS)}")
    _check_layout(it, layout, it.operands[0])
    left = tuple(n for d, n in enumerate(it.shape(it.operands[0])) if d not in it["dims"])
    check(it.shape(it.results[0]) == left, f"the result must be {list(left)}")


@op("reduce_scatter", "tile", attrs="dims:ints kind:str source:layout layout:layout")
def _reduce_scatter(it: Instance) -> None:
    """`reduce`, with the result held in `layout`: where warps would all end with the same values, each may hold, and
    add up, a share of them."""
    _check_reduced(it, it["source"])
    check(bool(it.shape(it.results[0])), "the result must be no scalar")
    _check_layout(it, it["layout"], it.results[0])


@op("expand", "tile", attrs="dims:ints layout:layout")
def _expand(it: Instance) -> None:
    """Repeats the tile along new dimensions, at the positions `dims` of the result. Nothing moves."""
    _check_layout(it, it["layout"], it.results[0])
    check(it["layout"].project(it["dims"]).shape == it.shape(it.operands[0]), "the other dimensions must agree")


@op("to_layout", "tile", attrs="source:layout layout:layout")
def _to_layout(it: Instance) -> None:
    """The same tile held otherwise: registers change names, or values go through shared memory."""
    _check_layout(it, it["source"], it.operands[0])
    _check_layout(it, it["layout"], it.results[0])


@op("transpose", "tile", attrs="permutation:ints")
def _transpose(it: Instance) -> None:
    """Dimension i of the result is dimension permutation[i] of the operand, in layout too: nothing moves."""
    shape = it.shape(it.operands[0])
    check(it.shape(it.results[0]) == tuple(shape[p] for p in it["permutation"]), "shapes do not match the permutation")


@op("scan", "tile", attrs="dim:int kind:str layout:layout")
def _scan(it: Instance) -> None:
    """Inclusive prefix combination along `dim`, in order of the index."""
    check(it["kind"] in REDUCTIONS, f"kind {it['kind']!r}; known: {', '.join(REDUCTIONS)}")
    _check_layout(it, it["layout"], it.operands[0])


@op("check", "bad value record", results=0)
def _check(it: Instance) -> None:
    """Where `bad` (a tile or scalar of i1): writes 1 and `value` (i64, like `bad`) into words 0 and 1 of the error
    record, and 1 where word 2 points to, unless that is null: the flag of the whole step (runtime/error_records.py)."""


@op("guard", "record", results=0)
def _guard(it: Instance) -> None:
    """The rest of the program runs only if word 0 of `record` is 0. Not within loops or conditions."""
    parent = it.operation.parent
    check(getattr(parent, "operation", parent).name == "func.func", "a guard stands in no region of another op")


# --- shared memory and tensor cores -----------------------------------------------------------------------------------


@op("alloc_shared", attrs="swizzle:str")
def _alloc_shared(it: Instance) -> None:
    """A buffer of the block, memref<stages x rows x columns x T, 3>. swizzle "xor": the 16-byte chunks of a row are
    permuted by the row, so that neither rows nor columns of chunks meet in a bank."""
    check(it["swizzle"] in ("none", "xor"), f"swizzle {it['swizzle']!r}")
    check(len(ir.MemRefType(it.results[0].type).shape) == 3, "a shared buffer has stages, rows and columns")


@op("async_copy", "ptr smem stage base *offsets", results=0, attrs="strides:ints extents:ints vector:int wide:bool")
def _async_copy(it: Instance) -> None:
    """Copies the [rows, columns] at `offsets` into a stage, in the background where the hardware can; zeros outside."""
    _check_window(it, 2, 4)


@op("async_commit", results=0)
def _async_commit(it: Instance) -> None:
    """Makes one group of the copies since the last commit."""


@op("async_wait", results=0, attrs="pending:int")
def _async_wait(it: Instance) -> None:
    """Waits until at most `pending` of the thread's latest groups are under way; before other threads read what was
    copied, a barrier must follow."""


@op("barrier", results=0)
def _barrier(it: Instance) -> None:
    """All threads of the block; orders their shared-memory accesses."""


@op("load_shared", "smem stage *offsets", attrs="transposed:bool layout:layout")
def _load_shared(it: Instance) -> None:
    """tile[i, j] = smem[stage, offset0 + i, offset1 + j]; transposed: smem[stage, offset0 + j, offset1 + i]."""
    _check_layout(it, it["layout"], it.results[0])


@op("store_shared", "tile smem stage *offsets", results=0, attrs="transposed:bool layout:layout")
def _store_shared(it: Instance) -> None:
    """The inverse of load_shared."""
    _check_layout(it, it["layout"], it.operands[0])


_INTRINSIC = re.compile(r"(MMA_SYNC|FMA|WGMMA)_(BF16|F16|TF32|F32|F64)_(\d+)x(\d+)x(\d+)")


@op("mma", "a b c", attrs="intrinsic:str lhs:layout rhs:layout layout:layout")
def _mma(it: Instance) -> None:
    """c + a b, on tensor cores. lhs, rhs and layout are those of a [M,K], b [K,N] and c [M,N]."""
    check(_INTRINSIC.fullmatch(it["intrinsic"]) is not None, f"intrinsic {it['intrinsic']!r}")
    (m, k), (k2, n) = it.shape(it.operands[0]), it.shape(it.operands[1])
    check(k == k2 and it.shape(it.operands[2]) == (m, n), f"[{m},{k}] x [{k2},{n}] into {it.shape(it.operands[2])}")
    for name, value in (("lhs", it.operands[0]), ("rhs", it.operands[1]), ("layout", it.operands[2])):
        _check_layout(it, it[name], value)


@op("round_tf32", "tile")
def _round_tf32(it: Instance) -> None:
    """float32 rounded to TF32's ten bits of fraction, to nearest, ties away from zero; elementwise."""
