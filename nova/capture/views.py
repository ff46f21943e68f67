"""View operations as values: how a view is read from its parent, and how a write to it goes back.

    y = x[:, 1]; y.add_(1)        y1 = aten.select(x0, 1, 1); y2 = aten.add(y1, 1)
                                  x1 = aten.select_scatter(x0, y2, 1, 1)

Detach, alias and clone are not views here: a value has no identity, so they vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from nova.capture.signature import TensorType
from nova.errors import UnsupportedError

aten = torch.ops.aten

DTYPE_NAMES = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# (storage offset, sizes, strides, dtype, conjugate or negative bit): one way to look at a storage
Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
Emit = Callable[..., fx.Node]


@dataclass(slots=True, frozen=True)
class ViewOp:
    """child = target(parent, *args)."""

    target: Any
    args: tuple[Any, ...]


def strides(t: Tensor) -> tuple[int, ...]:
    """Empty for a tensor that has none (sparse, nested)."""
    return t.stride() if t.layout is torch.strided and not t.is_nested else ()


def geometry(t: Tensor) -> Geometry:
    dtype = t.dtype
    bits = (t.is_conj() + 2 * t.is_neg()) if dtype.is_complex or t.is_neg() else 0
    return int(t.storage_offset()), tuple(t.shape), t.stride(), dtype, bits


def is_leaf(t: Tensor) -> bool:
    """`t.is_leaf`, which PyTorch refuses to say of a window made in no_grad mode once its parameter has changed."""
    try:
        return t.is_leaf
    except RuntimeError:
        return False


def is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements between the first and the last of a view, inclusive."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def memory_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int] | None:
    """The permutation that makes a dense view contiguous, or None if it has holes or repeats."""
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], -sizes[d], d))
    permuted = tuple(sizes[d] for d in order), tuple(strides[d] for d in order)
    return order if is_contiguous(*permuted) else None


def _slice_args(x: Tensor, args: tuple[Any, ...]) -> tuple[int, int, int, int]:
    bounds: list[Any] = [*args, *(0, None, None, 1)[len(args) :]]
    dim, start, end, step = bounds
    size = x.shape[dim] if x.dim() else 1
    start = 0 if start is None else start
    end = size if end is None else end
    start, end = (max(0, min(size, v + size if v < 0 else v)) for v in (start, end))
    return dim % x.dim(), start, max(start, end), step


def _pairs(x: Tensor, dims: tuple[int, int]) -> ViewOp:
    order = list(range(x.dim()))
    a, b = dims
    if order:
        order[a], order[b] = order[b], order[a]
    return ViewOp(aten.permute.default, (order,))


_END = 1 << 62  # of a slice: beyond any size


def is_whole(args: tuple[Any, ...]) -> bool:
    """Whether a slice (dim, start, end, step) leaves nothing out, whatever the size."""
    bounds: list[Any] = [*args, *(0, None, None, 1)[len(args) :]]
    start, end, step = bounds[1:]
    return start in (0, None) and (end is None or end >= _END) and step == 1


def canonical_steps(ops: list[tuple[tuple[int, ...], ViewOp]]) -> list[tuple[Any, ...]]:
    """View operations, each with the sizes it is applied to, without those that change nothing whatever the sizes.

    Whole slices go, permutations in a row become one, and of reshapes in a row only the last counts.
    """
    steps: list[tuple[Any, ...]] = []
    for sizes, op in ops:
        args: Any = op.args
        if op.target is aten.slice.Tensor:
            if not is_whole(args):
                steps.append((op.target, *args, *(0, None, None, 1)[len(args) :]))
        elif op.target is aten.permute.default:
            order = list(args[0])
            if steps and steps[-1][0] is op.target:
                before = steps.pop()[1]
                order = [before[d] for d in order]
            if order != sorted(order):
                steps.append((op.target, order))
        elif op.target is aten.expand.default and list(args[0]) == list(sizes):
            continue
        elif op.target in (aten.view.default, aten.unsqueeze.default):
            start = sizes
            shape = list(args[0]) if op.target is aten.view.default else [*sizes[: args[0]], 1, *sizes[args[0] :]]
            if steps and steps[-1][0] is aten.view.default:
                start = steps.pop()[2]
            if list(start) != shape:
                steps.append((aten.view.default, shape, start))
        else:
            steps.append((op.target, *args))
    return steps


def single_view(func: Any, x: Tensor, out: Tensor, args: tuple[Any, ...]) -> ViewOp | None:
    """The canonical form of a view operation with one result; None for one without a canonical form."""
    name = func._schema.name
    if func is aten.view.dtype:
        return ViewOp(func, args)
    if name in _RESHAPES:
        return ViewOp(aten.view.default, (list(out.shape),))
    match name:
        case "aten::t":
            return _pairs(x, (0, 1)) if x.dim() == 2 else ViewOp(aten.view.default, (list(out.shape),))
        case "aten::transpose":
            return _pairs(x, args[:2])
        case "aten::permute":
            return ViewOp(aten.permute.default, ([d % x.dim() for d in args[0]],)) if x.dim() else None
        case "aten::slice":
            return ViewOp(aten.slice.Tensor, _slice_args(x, args))
        case "aten::select":
            dim, index = args[0] % x.dim(), args[1]
            return ViewOp(aten.select.int, (dim, index % x.shape[dim]))
        case "aten::unsqueeze":
            return ViewOp(aten.unsqueeze.default, (args[0] % (x.dim() + 1),))
        case "aten::expand":
            return ViewOp(aten.expand.default, (list(out.shape),))
        case "aten::diagonal":
            placed: list[Any] = [*args, *(0, 0, 1)[len(args) :]]
            offset, a, b = placed
            return ViewOp(aten.diagonal.default, (offset, a % x.dim(), b % x.dim()))
        case "aten::unfold":
            return ViewOp(aten.unfold.default, (args[0] % max(x.dim(), 1), *args[1:]))
        case "aten::view_as_real" | "aten::view_as_complex":
            return ViewOp(func, ())
        case "aten::_conj":
            return ViewOp(aten.conj_physical.default, ())
        case "aten::_neg_view":
            return ViewOp(aten.neg.default, ())
    return None


_RESHAPES = {
    "aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::squeeze", "aten::_reshape_copy", "aten::alias",
}  # fmt: skip


def several_views(func: Any, x: Tensor, outs: list[Tensor], args: tuple[Any, ...]) -> list[ViewOp] | None:
    """Split, chunk and unbind as slices and selects."""
    name = func._schema.name
    if name == "aten::unbind":
        dim = (args[0] if args else 0) % x.dim()
        return [ViewOp(aten.select.int, (dim, i)) for i in range(len(outs))]
    if name.removeprefix("aten::") in (
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "chunk",
        "unsafe_chunk",
    ):
        dim = (args[1] if len(args) > 1 else 0) % x.dim()
        views, start = [], 0
        for out in outs:
            views.append(ViewOp(aten.slice.Tensor, (dim, start, start + out.shape[dim], 1)))
            start += out.shape[dim]
        return views
    return None


def write_back(emit: Emit, parent: fx.Node, parent_type: TensorType, child: fx.Node, op: ViewOp) -> fx.Node:
    """The parent's new value after its view `op` was overwritten with `child`."""
    target, args = op.target, op.args
    sizes = parent_type.shape
    if target in (aten.view.default, aten.unsqueeze.default):
        return emit(aten.view.default, (child, list(sizes)), parent_type)
    if target is aten.permute.default:
        inverse = [0] * len(args[0])
        for position, dim in enumerate(args[0]):
            inverse[dim] = position
        return emit(aten.permute.default, (child, inverse), parent_type)
    if target is aten.slice.Tensor:
        dim, start, end, step = args
        varies = parent.meta.get("dynamic")  # then an end is whole in this run at most, unless it is beyond any
        if (start or 0, step) == (0, 1) and (end is None or end >= (_END if varies else sizes[dim])):
            return child
        return emit(aten.slice_scatter.default, (parent, child, dim, start, end, step), parent_type)
    if target is aten.select.int:
        return emit(aten.select_scatter.default, (parent, child, *args), parent_type)
    if target is aten.diagonal.default:
        return emit(aten.diagonal_scatter.default, (parent, child, *args), parent_type)
    if target is aten.as_strided.default:
        return emit(aten.as_strided_scatter.default, (parent, child, *args), parent_type)
    if target is aten.view_as_real.default:
        return emit(aten.view_as_complex.default, (child,), parent_type)
    if target is aten.view_as_complex.default:
        return emit(aten.view_as_real.default, (child,), parent_type)
    if target in (aten.conj_physical.default, aten.neg.default):
        return emit(target, (child,), parent_type)
    if target is aten.view.dtype:
        return emit(aten.view.dtype, (child, DTYPES[parent_type.dtype]), parent_type)
    if target is aten.expand.default:
        for dim, size in enumerate(sizes):  # every copy of an element was written with the same value
            offset = len(args[0]) - len(sizes)
            if size == 1 and args[0][dim + offset] != 1:
                shape = tuple(1 if d <= dim + offset and sizes[d - offset] == 1 else s for d, s in enumerate(args[0]))
                child = emit(
                    aten.slice.Tensor,
                    (child, dim + offset, 0, 1, 1),
                    TensorType(shape, parent_type.dtype, parent_type.device),
                )
        return emit(aten.view.default, (child, list(sizes)), parent_type)
    raise UnsupportedError(f"a write through {target}; write to the tensor it is a view of, or clone it first")


def flat_span(tensor: torch.Tensor, length: int, offset: int) -> torch.Tensor:
    """The flat span of a tensor's storage that a `flat` input stands for."""
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset() + offset)
