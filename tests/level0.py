"""Level-0 graphs for tests of the emitter, without running a whole capture.

`trace(fn, *tensors)` traces a function of tensors that returns tensors into one functional ATen graph, and wraps it as
a `CapturedStep` whose inputs are all arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from nova.capture.signature import CapturedStep, InputSpec, OutputSpec, Signature, Source, TensorType
from nova.dialect.emit import SHORT_NAMES


def type_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorType(tuple(value.shape), SHORT_NAMES[value.dtype])
    if isinstance(value, (list, tuple)):
        return tuple(type_of(v) for v in value)
    return None


def trace(fn: Callable, *tensors: Tensor, scalars: tuple[int, ...] = ()) -> CapturedStep:
    """The captured form of `fn(*tensors)`; positions in `scalars` are traced Python numbers."""
    with torch.backends.mkldnn.flags(enabled=False):
        traced = make_fx(fn)(*tensors)  # autograd runs here, which functionalization forbids
        module = make_fx(torch.func.functionalize(traced))(*tensors)
    graph: fx.Graph = module.graph
    _record_types(module, tensors)
    signature = Signature()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for position, (node, tensor) in enumerate(zip(placeholders, tensors, strict=True)):
        node.meta["input"] = position
        role = "scalar" if position in scalars else "arg"
        signature.inputs.append(InputSpec(node.name, role, type_of(tensor), Source("arg", position)))
    output = next(n for n in graph.nodes if n.op == "output")
    returned = pytree.tree_leaves(output.args[0])
    for node in returned:
        signature.outputs.append(OutputSpec("user", node.meta["type"]))
    output.args = (tuple(returned),)
    _inline_attributes(module, graph)
    graph.eliminate_dead_code()
    return CapturedStep(graph, signature)


def _record_types(module: fx.GraphModule, tensors: tuple[Tensor, ...]) -> None:
    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            if node.op != "output":
                node.meta["type"] = type_of(value)
            return value

    with torch.backends.mkldnn.flags(enabled=False):
        Recorder(module).run(*tensors)


def _inline_attributes(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Constants that tracing lifted (torch.tensor(..) in the function) become aten.full or a stack of them."""
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        with graph.inserting_before(node):
            items = [
                graph.call_function(torch.ops.aten.full.default, ([], v), {"dtype": value.dtype})
                for v in value.flatten().tolist()
            ]
            for item in items:
                item.meta["type"] = TensorType((), SHORT_NAMES[value.dtype])
            made = items[0]
            if value.dim():
                stacked = graph.call_function(torch.ops.aten.stack.default, (items,))
                stacked.meta["type"] = TensorType((value.numel(),), SHORT_NAMES[value.dtype])
                made = graph.call_function(torch.ops.aten.view.default, (stacked, list(value.shape)))
                made.meta["type"] = type_of(value)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
