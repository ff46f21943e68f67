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

import torch
from torch import fx

from nova.capture import keep as _keep  # noqa: F401  (registers the operators)
from nova.capture.signature import TensorType
from nova.capture.views import aten, is_whole
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
        _not_one(recorder, node)
        return
    else:
        return
    if found:
        node.meta["dynamic"] = found
        recorder.has_dynamic = True
        recorder.dynamic.setdefault(type_.shape, []).append(node)
    tell_apart(recorder, node, type_.shape)


# ---- runs whose sizes cannot be told apart -----------------------------------------------------------------------


def tell_apart(recorder: Recorder, node: fx.Node, out: tuple[int, ...]) -> None:
    """Forbids the replay of a run whose data-dependent sizes happen to look like others.

    A size of one broadcasts, and derivatives then have sums that other runs need not (or lack some that they need); a
    size that is also a constant of what it is combined with leaves open which of the two a number meant.
    """
    if node.target is not operator.getitem and any(out[d] == 0 for d in dims(node)):
        recorder.forbid_replay("a result whose size depends on the data was empty in this run")
    if not node.meta.get("dynamic_operands") or node.target is operator.getitem:
        return
    if _is_pointwise(node.target):
        _aligned(recorder, node, len(out))
        return
    _not_one(recorder, node)
    sparse = "sparse" in str(node.target) or any(n.meta.get("sparse") for n in node.all_input_nodes)
    if not sparse and not _is_followed(node, out):
        recorder.forbid_replay(f"how the result of {node.target} depends on data-dependent sizes is not followed")


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _aligned(recorder: Recorder, node: fx.Node, rank: int) -> None:
    """Dimensions that an elementwise operation puts side by side."""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta["type"], TensorType)]
    for d in range(1, rank + 1):
        beside = [n for n in tensors if len(shape(n)) >= d]
        varying = [n for n in beside if len(shape(n)) - d in dims(n)]
        if not varying:
            continue
        sizes = {shape(n)[-d] for n in beside if n not in varying}
        if sizes - {1} or (sizes and shape(varying[0])[-d] == 1):
            recorder.forbid_replay("a size that depends on the data met a constant one")
        if len({dict(zip(sorted(dims(n)), origin(n), strict=True))[len(shape(n)) - d] for n in varying}) > 1:
            recorder.forbid_replay("sizes that depend on different data met")


# operations whose sizes `_result` follows by a rule of their own
_PLACED = {
    aten.permute.default, aten.view.default, aten.unsqueeze.default, aten.select.int, aten.slice.Tensor,
    aten.expand_as.default, aten.expand.default, aten.mv.default, aten.mm.default, aten.bmm.default,
    aten.addmm.default, aten.baddbmm.default, aten.index_select.default, aten.gather.default, aten.embedding.default,
    aten.cat.default, aten.stack.default,
}  # fmt: skip
# operations that keep the sizes of their first operand
_KEEPING = {
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, torch.ops.nova.of_several.default,
}  # fmt: skip
# those, and whose derivatives, are the same for a size of one
_PLAIN = {
    *_PLACED, *_KEEPING, *_LIKE_FIRST, *DATA_DEPENDENT, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
    aten.mean.dim, aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
}  # fmt: skip


def _not_one(recorder: Recorder, node: fx.Node) -> None:
    """Many derivatives treat a size of one apart."""
    ones = any(shape(n)[d] == 1 for n in node.all_input_nodes for d in dims(n))
    if ones and node.target not in _PLAIN:
        recorder.forbid_replay("a size that depends on the data was one in this run")


def _is_followed(node: fx.Node, out: tuple[int, ...]) -> bool:
    """Whether it is known where an operation's data-dependent sizes go: by a rule, or to where an operand has them."""
    target: Any = node.target
    if target in _SOURCES or target in DATA_DEPENDENT or target in _REDUCTIONS or target in _LIKE_FIRST:
        return True
    if target in _PLACED or target in _KEEPING or not out:
        return True
    return _alike(node, out) is not None and len({*out}) == len(out)  # else it may have exchanged dimensions


def _alike(node: fx.Node, out: tuple[int, ...]) -> fx.Node | None:
    """A data-dependent operand of the result's very sizes."""
    return next((n for n in node.all_input_nodes if dims(n) and shape(n) == out), None)


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
    if target is aten.mv.default:
        return dims(first) & {0}
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
    return frozenset((fits or right)[0] for right, fits in _moves(old, new, dynamic))


def _moves(old: tuple[int, ...], new: tuple[int, ...], dynamic: Dims) -> list[tuple[list[int], list[int]]]:
    """For each group with a data-dependent size: its new dimensions, and those that may be the one."""
    if not dynamic:
        return []
    if 0 in old:
        stand_in = 1_000_003  # no other size has this factor
        places = [i for i, d in enumerate(new) if d == 0]
        old = tuple(stand_in if d == 0 else d for d in old)
        new = tuple(stand_in if i in places[:1] else d for i, d in enumerate(new))
    found = []
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
        if right and any(d in dynamic for d in left):
            fixed = math.prod(old[d] for d in left if d not in dynamic)
            found.append((right, [d for d in right if math.prod(new[e] for e in right if e != d) == fixed]))
    return found


def check_reshape(recorder: Recorder, node: fx.Node, new: tuple[int, ...]) -> None:
    """Forbids the replay of a reshape that may treat data-dependent sizes in more than one way."""
    old, varying = shape(node), dims(node)
    ones = old != new and any(old[d] == 1 for d in varying)
    several = any(len(fits) != 1 and len(right) > 1 for right, fits in _moves(old, new, varying))
    if ones or (several and recorder.forward_operand() is None):
        recorder.forbid_replay("a reshape may treat data-dependent sizes in more than one way")


# ---- arguments ---------------------------------------------------------------------------------------------------


def arguments(recorder: Recorder, target: Any, args: tuple[Any, ...], type_: Any) -> tuple[Any, tuple[Any, ...]]:
    """The arguments of an operation without sizes that depend on data."""
    if not isinstance(type_, TensorType):
        return target, args
    first: Any = args[0] if args else None
    if target is aten.view.default and dims(first):
        if -1 in args[1]:
            return target, args
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
    operands = [n for n in recorder.forward_operands() if getattr(n.meta["type"], "shape", None) == type_.shape]
    if operands:
        if len({bool(dims(n)) for n in operands}) > 1:
            recorder.forbid_replay("operands of constant and of data-dependent size had one size in this run")
        return next((n for n in operands if dims(n)), None)
    found = recorder.dynamic.get(type_.shape)
    if not found or (target is aten.expand.default and shape(first) == type_.shape):
        return None
    if not recorder.lines.in_formula():
        if recorder.size_like is not None:
            return recorder.size_like if dims(recorder.size_like) else None
        if target is aten.full.default or recorder.literal_sizes:
            return None  # a constant of the user's has the size the user wrote
    if len({origin(node) for node in found}) > 1:
        recorder.forbid_replay("several results had the same data-dependent size in this run")
    if any(getattr(n.meta.get("type"), "shape", None) == type_.shape and not dims(n) for n in recorder.graph.nodes):
        recorder.forbid_replay("a result had a constant's size in this run")
    return found[-1]


def origin(node: fx.Node) -> tuple[Any, ...]:
    """What each data-dependent size of a node comes from: equal for sizes that are equal in every run."""
    if "origin" not in node.meta:
        node.meta["origin"] = tuple(_size_origin(node, d) for d in sorted(dims(node)))
    return node.meta["origin"]


_ENTRIES = {aten._values.default, aten._indices.default, aten.values.default, aten.indices.default}


def _size_origin(node: fx.Node, d: int) -> Any:
    args: Any = node.args
    target: Any = node.target
    source = args[0] if target is operator.getitem else node
    if target in (aten.nonzero.default, aten.masked_select.default):
        return ("index", _value(args[-1]))
    if target is aten.index.Tensor:
        masks = [i for i in args[1] if i is not None and i.meta["type"].dtype in ("bool", "u8")]
        if masks:
            return ("index", *map(_value, masks))
    if target in _ENTRIES:
        pattern = args[0]
        while pattern.target is aten.sparse_mask.default:
            pattern = pattern.args[1]
        return ("entries", pattern)
    if source.target in _SOURCES or (source.target in DATA_DEPENDENT and not _passed_on(source, node, d)):
        return (node, d)
    if target is aten.slice.Tensor and d == args[1] and not is_whole(args[1:]):
        return ("slice", origin(args[0]), *args[1:])
    found = _passed_on(source, node, d)
    if len(found) == 1:
        return next(iter(found))
    if not found:  # made from others: a sum of sizes, a product
        return (target, repr([a for a in args if not isinstance(a, fx.Node)]), *map(origin, source.all_input_nodes))
    return (node, d)


def _passed_on(source: fx.Node, node: fx.Node, d: int) -> set[Any]:
    """Origins of operands' sizes that are the result's size `d` in this run; of those in its place, if there are."""
    size, out = shape(node)[d], shape(node)
    found: set[Any] = set()
    for operand in source.all_input_nodes:
        if not dims(operand):
            continue
        sizes = dict(zip(sorted(dims(operand)), origin(operand), strict=True))
        place = d - len(out) + len(shape(operand))
        if _is_pointwise(source.target):
            found |= {sizes[place]} if place in sizes and shape(operand)[place] == size else set()
        else:
            found |= {o for e, o in sizes.items() if shape(operand)[e] == size}
    return found


def _value(x: Any, depth: int = 6) -> Any:
    """What a mask is made of: two of equal form are equal masks."""
    if not isinstance(x, fx.Node):
        return repr(x) if isinstance(x, list) else x
    if depth == 0 or x.kwargs or not (_is_pointwise(x.target) or x.target is aten.view.default):
        return x
    if torch.Tag.nondeterministic_seeded in x.target.tags:  # type: ignore[union-attr]
        return x
    return (x.target, *(_value(a, depth - 1) for a in x.args))


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
