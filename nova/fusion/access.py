"""Linear addressing: where a kernel's buffers are touched, as a function of the kernel's loop dimensions.

    linalg.generic, dims = [0, 2], map (d0, d1) -> (d1, d0 * 2)   on tensor<8x64xf32>
    Access: element offset = 0 + 2 * i0 + 64 * i2

Transposes, head splits, slices and convolution windows are all of this form, so nothing after this file knows about
maps or tensor ranks: there are coefficients per dimension, and that is all. The last coefficient is of `n floordiv NT`,
the number of the N tile, which partial reductions over tiles are indexed by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nova.errors import CompileError
from nova.mlir import ir

DYNAMIC = -(1 << 63)


@dataclass(frozen=True)
class View:
    """A tensor value as a strided window of a kernel buffer."""

    buffer: int
    element: ir.Type
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Access:
    """`offset + sum(coefficient[d] * i[d])`, in elements, over the kernel-wide dimensions."""

    buffer: int
    element: ir.Type
    offset: int
    coefficients: tuple[int, ...]

    def stride(self, dim: int) -> int:
        return self.coefficients[dim]

    def touches(self, dims: Sequence[int]) -> bool:
        return any(self.coefficients[d] for d in dims)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def view_of(value: ir.Value, position: dict[ir.Value, int]) -> View | None:
    """The window of a kernel argument that a tensor value is (through slices), else None."""
    if value in position:
        type_ = ir.RankedTensorType(value.type)
        return View(position[value], type_.element_type, 0, row_major(type_.shape))
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "tensor.extract_slice":
        return None
    source = view_of(owner.operands[0], position)
    return sliced(source, owner, list(ir.RankedTensorType(value.type).shape)) if source else None


def sliced(source: View, op: ir.Operation, shape: Sequence[int]) -> View:
    """The window that extract_slice takes of `source`, or that insert_slice writes in it."""
    fields = ("static_offsets", "static_sizes", "static_strides")
    offsets, sizes, steps = ([int(x) for x in op.attributes[name]] for name in fields)
    if DYNAMIC in (*offsets, *sizes, *steps):
        raise CompileError(f"{op.name} in a kernel must be static: {op}")
    offset = source.offset + sum(o * s for o, s in zip(offsets, source.strides, strict=True))
    strides = [step * s for step, s in zip(steps, source.strides, strict=True)]
    return View(source.buffer, source.element, offset, _drop_unit_dims(strides, sizes, shape))


def _drop_unit_dims(strides: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a rank-reducing slice: dimensions of size 1 that `shape` lacks disappear."""
    kept, wanted = [], list(shape)
    excess = len(sizes) - len(wanted)
    for stride, size in zip(strides, sizes, strict=True):
        if excess and size == 1 and not (wanted and wanted[0] == 1):
            excess -= 1
            continue
        kept.append(stride)
        wanted.pop(0)
    return tuple(kept)


def linear_form(expression: ir.AffineExpr, loops: int) -> tuple[list[int], int]:
    """Coefficients per loop, then of a tile number, and the constant of a linear affine expression."""
    coefficients = [0] * (loops + 1)
    if isinstance(expression, ir.AffineConstantExpr):
        return coefficients, expression.value
    if isinstance(expression, ir.AffineDimExpr):
        coefficients[expression.position] = 1
        return coefficients, 0
    if tile_of(expression):
        coefficients[-1] = 1
        return coefficients, 0
    if isinstance(expression, ir.AffineAddExpr):
        (left, a), (right, b) = (linear_form(e, loops) for e in (expression.lhs, expression.rhs))
        return [x + y for x, y in zip(left, right, strict=True)], a + b
    if isinstance(expression, ir.AffineMulExpr):
        (left, a), (right, b) = (linear_form(e, loops) for e in (expression.lhs, expression.rhs))
        if any(left) and any(right):
            raise CompileError(f"not linear: {expression}")
        if any(right):
            left, a, b = right, b, a
        return [x * b for x in left], a * b
    raise CompileError(f"not linear: {expression}")


def tile_of(expression: ir.AffineExpr) -> tuple[int, int] | None:
    """(loop, NT) of `loop floordiv NT`."""
    if not isinstance(expression, ir.AffineFloorDivExpr):
        return None
    loop, size = expression.lhs, expression.rhs
    if not isinstance(loop, ir.AffineDimExpr) or not isinstance(size, ir.AffineConstantExpr):
        raise CompileError(f"not linear: {expression}")
    return loop.position, size.value


def access_of(view: View, affine_map: ir.AffineMap, dims: Sequence[int], rank: int) -> Access:
    """The access of a generic's operand: its map over the kernel-wide ids of the generic's loops.

    `rank` counts the kernel's dimensions; one more, the tile number, follows them.
    """
    offset, coefficients = view.offset, [0] * (rank + 1)
    ids = [*dims, rank]
    for stride, expression in zip(view.strides, affine_map.results, strict=True):
        form, constant = linear_form(expression, len(dims))
        offset += stride * constant
        for loop, factor in enumerate(form):
            coefficients[ids[loop]] += stride * factor
    return Access(view.buffer, view.element, offset, tuple(coefficients))


def contiguous_run(access: Access, dims: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """(stride, length) of the innermost run of flat positions along which the access is an arithmetic progression."""
    if not dims:
        return 0, 1
    stride, length = access.coefficients[dims[-1]], sizes[dims[-1]]
    for dim in reversed(dims[:-1]):
        if access.coefficients[dim] != stride * length:
            break
        length *= sizes[dim]
    return stride, length
