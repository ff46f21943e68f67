"""Sizes that depend on data: which dimensions of which nodes, and arguments that must not hold them as numbers.

    rows = x[mask]                 aten.index: dimension 0 depends on data       f32[5!,6]
    (rows * w).mean().backward()   expand(g, [5, 6]) -> expand_as(g, %rows_times_w)
                                   div(g, 30)        -> div(g, sum(full_like(%rows_times_w, 1)))

`meta["dynamic"]` of a node is the set of its dimensions that another run may change (the type holds the sizes seen
now), one set a result for operations with several; it is True for sparse tensors. The runtime gives these nodes, and
those that read them, to PyTorch.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from nova.capture.signature import TensorType
from nova.capture.views import aten
from nova.errors import UnsupportedError

if TYPE_CHECKING:
    from nova.capture.record import Recorder

Dims = frozenset[int]
NONE: Dims = frozenset()

# operations whose result has as many elements as the data say, with the dimension that varies
_SOURCES: dict[Any, int] = {
    aten.nonzero.default: 0, aten.masked_select.default: 0, aten._unique2.default: 0,
    aten.unique_consecutive.default: 0, aten.bincount.default: 0, aten.repeat_interleave.Tensor: 0,
    aten._values.default: 0, aten.values.default: 0,
    aten._indices.default: 1, aten.indices.default: 1, aten._unique.default: 0,
}  # fmt: skip
DATA_DEPENDENT = {*_SOURCES, aten.index.Tensor, aten.unique_dim.default}

_REDUCTIONS = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
    aten.var.correction, aten.logsumexp.default, aten.argmax.default, aten.argmin.default, aten.prod.dim_int,
    aten.linalg_vector_norm.default,
    aten.max.dim, aten.min.dim, aten.std.correction, aten.any.dims, aten.all.dims,
}  # fmt: skip
_DIMS_AT = {aten.linalg_vector_norm.default: 2}
_LIKE_FIRST = {aten.index_put.default, aten.index_add.default, aten.scatter.src, aten.scatter.value,
               aten.scatter_add.default, aten.index_copy.default, aten.full_like.default,
               aten.masked_scatter.default}  # fmt: skip


def dims(node: Any) -> Dims:
    found = node.meta.get("dynamic", NONE) if isinstance(node, fx.Node) else NONE
    return found if isinstance(found, frozenset) else NONE


def shape(node: fx.Node) -> tuple[int, ...]:
    return node.meta["type"].shape


def mark(recorder: Recorder, node: fx.Node) -> None:
    """Works out which dimensions of a new node depend on data."""
    type_ = node.meta["type"]
    if any(n.meta.get("dynamic") for n in node.all_input_nodes):
        node.meta["dynamic_operands"] = True
    if node.target is operator.getitem:
        args: Any = node.args
        several = args[0].meta.get("dynamic", ())
        found = several[args[1]] if isinstance(several, tuple) and several else NONE
    elif isinstance(type_, TensorType):
        found = _result(node, type_.shape)
    elif isinstance(type_, tuple):
        each = tuple(_result(node, t.shape) if t is not None else NONE for t in type_)
        if any(each):
            node.meta["dynamic"] = each
            recorder.has_dynamic = True
        return
    else:
        return
    if found:
        node.meta["dynamic"] = found
        recorder.has_dynamic = True
        recorder.dynamic[type_.shape] = node


def _result(node: fx.Node, out: tuple[int, ...]) -> Dims:
    target: Any = node.target
    args: Any = node.args
    if target in _SOURCES:
        return frozenset({_SOURCES[target]}) if out else NONE
    if target is aten.unique_dim.default:
        return frozenset({args[1] if len(out) > 1 else 0})
    if target is aten.index.Tensor:
        return _indexed(args[0], args[1])
    if not node.meta.get("dynamic_operands"):
        return NONE
    first: Any = args[0] if args and isinstance(args[0], fx.Node) else None
    if target is aten.permute.default:
        return frozenset(i for i, d in enumerate(args[1]) if d in dims(first))
    if target is aten.view.default:
        return view_dims(shape(first), out, dims(first))
    if target is aten.unsqueeze.default:
        return frozenset(d + (d >= args[1]) for d in dims(first))
    if target is aten.select.int:
        return frozenset(d - (d > args[1]) for d in dims(first) if d != args[1])
    if target in (aten.slice.Tensor, *_LIKE_FIRST):
        return dims(first)
    if target is aten.expand_as.default:
        return dims(args[1])
    if target in _REDUCTIONS:
        return _reduced(node, first, out)
    if target in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
        a, b = args[-2:]
        last = len(out) - 1
        return frozenset(d for d in dims(a) if d < last) | frozenset({last} if last in dims(b) else ())
    if target is aten.index_select.default:
        moved = frozenset(d for d in dims(first) if d != args[1])
        return moved | (frozenset({args[1]}) if dims(args[2]) else NONE)
    if target is aten.gather.default:
        return dims(args[2])
    if target is aten.embedding.default:
        return dims(args[1])
    if target in (aten.cat.default, aten.stack.default):
        dim = int(args[1]) % len(out) if len(args) > 1 else 0
        pieces = frozenset().union(*(dims(n) for n in args[0]))
        return pieces if target is aten.cat.default else frozenset(d + (d >= dim) for d in pieces)
    return _broadcast(node, out)


def _indexed(x: fx.Node, indices: Any) -> Dims:
    """Advanced indexing: masks make a data-dependent dimension where the indexed ones stood."""
    position, advanced, width, varies = 0, [], 0, False
    kept: list[tuple[int, bool]] = []  # (place in the input, dynamic)
    for index in indices:
        if index is None:
            kept.append((position, position in dims(x)))
            position += 1
            continue
        advanced.append(position)
        mask = index.meta["type"].dtype in ("bool", "u8")
        varies = varies or mask or bool(dims(index))
        width = max(width, 1 if mask else len(shape(index)))
        position += len(shape(index)) if mask else 1
    kept += [(d, d in dims(x)) for d in range(position, len(shape(x)))]
    consecutive = _consecutive(indices)
    before = sum(1 for place, _ in kept if advanced and place < advanced[0]) if consecutive else 0
    flags = [d for _, d in kept[:before]] + [False] * width + [d for _, d in kept[before:]]
    if varies:
        inner = frozenset().union(*(dims(i) for i in indices if i is not None)) or {0}
        for d in inner:
            flags[before + min(d, width - 1)] = True
    return frozenset(i for i, flag in enumerate(flags) if flag)


def _consecutive(indices: Any) -> bool:
    used = [i for i, index in enumerate(indices) if index is not None]
    return not used or used == list(range(used[0], used[-1] + 1))


def _reduced(node: fx.Node, first: Any, out: tuple[int, ...]) -> Dims:
    target: Any = node.target
    at = _DIMS_AT.get(target, 1)
    rank = len(shape(first))
    listed: Any = node.args[at] if len(node.args) > at else None
    over = range(rank) if listed is None or listed == [] else [listed] if isinstance(listed, int) else listed
    gone = {int(d) % rank for d in over} if rank else set()
    left = [d for d in range(rank) if d not in gone]
    if len(out) == rank:
        return frozenset(d for d in dims(first) if d not in gone)
    return frozenset(left.index(d) for d in dims(first) if d in left)


def _broadcast(node: fx.Node, out: tuple[int, ...]) -> Dims:
    """Operations on aligned dimensions; a dimension that an operand has and the result has not is gone."""
    found: set[int] = set()
    for operand in node.all_input_nodes:
        if not isinstance(operand.meta["type"], TensorType):
            continue
        rank = len(shape(operand))
        for d in dims(operand):
            at = d + len(out) - rank if len(out) >= rank else d
            if 0 <= at < len(out) and out[at] == shape(operand)[d]:
                found.add(at)
    return frozenset(found)


def view_dims(old: tuple[int, ...], new: tuple[int, ...], dynamic: Dims) -> Dims:
    """Where data-dependent dimensions go in a reshape, group of dimensions by group with equal products."""
    if not dynamic:
        return NONE
    if 0 in old:
        stand_in = 1_000_003  # no other size has this factor
        places = [i for i, d in enumerate(new) if d == 0]
        old = tuple(stand_in if d == 0 else d for d in old)
        new = tuple(stand_in if i in places[:1] else d for i, d in enumerate(new))
    found: set[int] = set()
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = 1, 1
        left: list[int] = []
        right: list[int] = []
        while not left or not right or a != b:
            if i < len(old) and (a <= b or not left) and (not left or a != b or not right):
                a, left, i = a * old[i], [*left, i], i + 1
            elif j < len(new):
                b, right, j = b * new[j], [*right, j], j + 1
            elif i < len(old):
                a, left, i = a * old[i], [*left, i], i + 1
            else:
                break
        moving = [d for d in left if d in dynamic]
        if moving and right:
            fixed = math.prod(old[d] for d in left if d not in dynamic)
            fits = [d for d in right if math.prod(new[e] for e in right if e != d) == fixed]
            found.add(fits[0] if fits else right[0])
    return frozenset(found)


# ---- arguments ---------------------------------------------------------------------------------------------------


def arguments(recorder: Recorder, target: Any, args: tuple[Any, ...], type_: Any) -> tuple[Any, tuple[Any, ...]]:
    """The arguments of an operation without sizes that depend on data."""
    if not isinstance(type_, TensorType):
        return target, args
    first: Any = args[0] if args else None
    if target is aten.view.default and dims(first):
        places = view_dims(shape(first), type_.shape, dims(first))
        operand = recorder.forward_operand()
        if operand is not None and shape(operand) == type_.shape:
            places = dims(operand)  # a derivative gives the gradient the shape of the forward's operand
        if len(places) > 1:
            raise UnsupportedError("a view with more than one data-dependent size", recorder.line)
        return target, (first, [-1 if i in places else d for i, d in enumerate(type_.shape)])
    if target in (aten.expand.default, aten.full.default):
        like = _size_model(recorder, target, first, type_)
        if like is not None:
            return (
                (aten.expand_as.default, (first, like))
                if target is aten.expand.default
                else (aten.full_like.default, (like, args[1]))
            )
    if recorder.lines.in_formula():
        if dims(recorder.forward_operand()) and recorder.lines.formula().startswith(_COUNTING):
            recorder.forbid_replay("the derivative of a variance over a data-dependent size holds it as a number")
        if target in _SCALED and isinstance(args[1], (int, float)) and dims(first):
            return _counted(recorder, target, args)
        _refuse_sizes(recorder, target, args)
    return target, args


# derivatives whose numbers come from sizes in ways that are not followed
_COUNTING = ("VarBackward", "StdBackward", "VarMeanBackward", "StdMeanBackward")
_FOLLOWED = {aten.view.default, aten.expand.default, aten.full.default, aten.sum.dim_IntList, aten.permute.default}


def _refuse_sizes(recorder: Recorder, target: Any, args: tuple[Any, ...]) -> None:
    """A derivative that holds a size as a number: this recording is right, but must not be replayed."""
    operand = recorder.forward_operand()
    tensors = [a for a in args if isinstance(a, fx.Node)]
    if target in _FOLLOWED or "sparse" in str(target) or not any(map(dims, (operand, *tensors))):
        return
    sizes = any(isinstance(a, (list, tuple)) and a and all(type(x) is int for x in a) for a in args[1:])
    window = target is aten.slice.Tensor and args[1] in dims(args[0])
    if sizes or window:
        recorder.forbid_replay(
            f"the derivative of an operation on data-dependent sizes ({target}) holds them as numbers"
        )


def _size_model(recorder: Recorder, target: Any, first: Any, type_: TensorType) -> fx.Node | None:
    """The data-dependent tensor that has the size asked for. A derivative takes the size of its forward's operand."""
    operand = recorder.forward_operand()
    if operand is not None:
        return operand if dims(operand) and shape(operand) == type_.shape else None
    like = recorder.dynamic.get(type_.shape)
    if like is None or (target is aten.expand.default and (like is first or shape(first) == type_.shape)):
        return None
    if target is aten.full.default and not recorder.lines.in_formula():
        return None  # a constant of the user's has the size the user wrote
    return like


_SCALED = {aten.div.Scalar, aten.div.Tensor}


def _counted(recorder: Recorder, target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The derivative of a mean divides by a number of elements that depends on data: count them."""
    x, _ = args
    type_ = x.meta["type"]
    listed = recorder.lines.mean_dims()
    if listed is None:
        return target, args
    rank = len(type_.shape)
    spread = sorted({d % rank for d in listed}) if listed else list(range(rank))
    if not dims(x) & set(spread):
        return target, args
    ones = recorder.emit(aten.full_like.default, (x, 1), type_)
    kept = [d for d in range(len(type_.shape)) if d not in spread]
    for d in sorted(kept, reverse=True):
        type_ = TensorType(tuple(s for i, s in enumerate(type_.shape) if i != d), type_.dtype, type_.device)
        ones = recorder.emit(aten.select.int, (ones, d, 0), type_)
    elements = recorder.emit(aten.sum.default, (ones,), TensorType((), type_.dtype, type_.device))
    return aten.div.Tensor, (x, elements)
