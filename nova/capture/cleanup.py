"""Small repairs of a recorded graph: dead nodes, list round trips, sizes that depend on data."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from nova.capture.signature import TensorType
from nova.capture.views import aten
from nova.errors import UnsupportedError

if TYPE_CHECKING:
    from nova.capture.record import Recorder

# operations whose result has as many elements as the data say
DATA_DEPENDENT = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor, aten._coalesce.default,
    aten.index.Tensor, aten._values.default, aten._indices.default, aten.values.default, aten.indices.default,
    aten.histc.default, aten._unique.default, aten.unique_dim_consecutive.default,
}  # fmt: skip
_ALWAYS = DATA_DEPENDENT - {aten.index.Tensor, aten.histc.default}


def _sizes(node: fx.Node) -> frozenset[int]:
    return node.meta.get("dynamic", frozenset())


def _shapes(type_: Any) -> list[tuple[int, ...]]:
    if isinstance(type_, TensorType):
        return [type_.shape]
    return [t.shape for t in type_ if t is not None] if isinstance(type_, tuple) else []


def mark_dynamic(recorder: Recorder, node: fx.Node) -> None:
    """meta["dynamic"]: the sizes of this node that another run may change (they stand in its type as seen now)."""
    shapes = _shapes(node.meta["type"])
    inherited = frozenset().union(*(_sizes(n) for n in node.all_input_nodes)) if node.all_input_nodes else frozenset()
    sizes: set[int] = {d for shape in shapes for d in shape if d in inherited}
    target = node.target
    if target is operator.getitem and "dynamic" in node.args[0].meta:  # type: ignore[union-attr]
        sizes |= set(shapes[0]) & _sizes(node.args[0]) if shapes else set()  # type: ignore[arg-type]
    elif target in _ALWAYS:
        sizes |= {shape[0] for shape in shapes if shape} if target is not aten._indices.default else {shapes[0][-1]}
    elif target is aten.index.Tensor and _has_mask(node):
        sizes |= {d for d in shapes[0] if d not in node.args[0].meta["type"].shape} or {shapes[0][0]}  # type: ignore[union-attr]
    elif inherited and target is aten.view.default:
        known = set(node.args[0].meta["type"].shape) - inherited  # type: ignore[union-attr]
        sizes |= {d for d in shapes[0] if d not in known}
    elif inherited and target in (aten.cat.default, aten.stack.default):
        dim = node.args[1] if len(node.args) > 1 else 0
        sizes |= {shapes[0][dim]} if shapes[0] else set()  # type: ignore[index]
    if sizes:
        node.meta["dynamic"] = frozenset(sizes)
        for shape in shapes:
            recorder.dynamic[shape] = node


def _has_mask(node: fx.Node) -> bool:
    return any(n is not None and n.meta["type"].dtype in ("bool", "u8") for n in node.args[1])  # type: ignore[union-attr]


def dynamic_arguments(
    recorder: Recorder, target: Any, args: tuple[Any, ...], type_: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Sizes in arguments that come from data: view takes -1, expand takes another tensor's shape."""
    if not isinstance(type_, TensorType):
        return target, args
    like = recorder.dynamic.get(type_.shape)
    if target is aten.view.default:
        sizes = _sizes(args[0])
        places = [i for i, d in enumerate(args[1]) if d in sizes]
        if len(places) == 1:
            shape = list(args[1])
            shape[places[0]] = -1
            return target, (args[0], shape)
        if places:
            raise UnsupportedError(
                "a view whose data-dependent size cannot be told from its other sizes", recorder.line
            )
    if (
        target is aten.expand.default
        and like is not None
        and like is not args[0]
        and like.meta["type"].shape == type_.shape
    ):
        return aten.expand_as.default, (args[0], like)
    if target is aten.full.default and like is not None and any(d in _sizes(like) for d in type_.shape):
        # a constant beside data-dependent tensors: as large as the latest of them with this shape
        return aten.full_like.default, (like, args[1])
    return target, args


def join_lists(graph: fx.Graph) -> None:
    """stack([x[0], x[1], ..., x[n-1]]) is x."""
    for node in list(graph.nodes):
        if node.target is not aten.stack.default or (len(node.args) > 1 and node.args[1] != 0):
            continue
        pieces = node.args[0]
        if not all(
            p.target is aten.select.int and p.args[0] is pieces[0].args[0] and p.args[1:] == (0, i)
            for i, p in enumerate(pieces)
        ):
            continue
        whole = pieces[0].args[0]
        if whole.meta["type"] == node.meta["type"]:
            node.replace_all_uses_with(whole)


def drop_dead(graph: fx.Graph) -> None:
    """Erases every operation that no output needs (all are free of side effects)."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
