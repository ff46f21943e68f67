"""Runs a captured graph in PyTorch, node by node, with the layout rule of level 0: every value is dense, row-major.

run = Interpreter(captured)
fresh = run(tensors, scalars, seed)     fresh outputs in order; state outputs are written into their inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from nova.capture.signature import CapturedStep, TensorType
from nova.capture.views import DTYPES


class Interpreter:
    """The executable of a captured step that computes with eager PyTorch, and checks every value's declared type."""

    def __init__(self, captured: CapturedStep):
        self.captured = captured
        self.nodes = list(captured.graph.nodes)
        captured.graph.lint()
        self.last_use: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(self.nodes):
            for used in node.all_input_nodes:
                if used not in seen:
                    seen.add(used)
                    self.last_use.setdefault(node, []).append(used)

    def bind(self, tensors: Sequence[Tensor], scalars: Sequence[float], seed: int) -> list[Tensor]:
        """One value an input, flat spans for those that are lifted flat."""
        remaining, numbers = iter(tensors), iter(scalars)
        values = []
        for spec in self.captured.signature.inputs:
            if spec.role == "scalar":
                values.append(torch.tensor(next(numbers), dtype=torch.float64))
            elif spec.role == "seed":
                values.append(torch.tensor(seed))
            else:
                t = next(remaining).detach()
                if spec.flat:
                    t = t.as_strided(spec.type.shape, (1,), t.storage_offset() + spec.span_offset)
                assert t.is_contiguous(), spec
                values.append(t)
        return values

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], scalars: Sequence[float], seed: int = 0) -> list[Tensor]:
        inputs = self.bind(tensors, scalars, seed)
        results = self.run(inputs)
        outputs = list(zip(self.captured.signature.outputs, results, strict=True))
        fresh = []
        for spec, value in outputs:
            if spec.kind == "state":
                continue
            if spec.strides is not None:
                fresh.append(torch.empty_strided(value.shape, spec.strides, dtype=value.dtype).copy_(value))
            else:
                fresh.append(
                    value.clone(memory_format=torch.contiguous_format)
                    if value.layout is torch.strided
                    else value.clone()
                )
        new = [(value.clone(), inputs[spec.input]) for spec, value in outputs if spec.kind == "state"]
        for value, target in new:
            target.copy_(value)
        return fresh

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Values of the graph's outputs, nothing written back."""
        env: dict[fx.Node, Any] = {}

        def load(a: Any) -> Any:
            return fx.node.map_arg(a, lambda n: env[n])

        for node in self.nodes:
            if node.op == "placeholder":
                env[node] = inputs[node.meta["input"]]
            elif node.op == "output":
                return list(load(node.args[0]))
            else:
                env[node] = self.dense(node, node.target(*load(node.args), **load(node.kwargs)))
            for dead in self.last_use.get(node, ()):
                del env[dead]
        raise AssertionError("a graph without an output")

    def dense(self, node: fx.Node, value: Any) -> Any:
        types = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
        values = value if isinstance(value, (tuple, list)) else (value,)
        out = []
        for declared, v in zip(types, values, strict=True):
            assert (declared is None) == (v is None), node.format_node()
            if v is None or v.layout is not torch.strided:
                out.append(v)
                continue
            assert isinstance(declared, TensorType)
            assert v.dtype == DTYPES[declared.dtype], f"{node.format_node()}: {v.dtype} is not {declared}"
            if "dynamic" not in node.meta:
                assert tuple(v.shape) == declared.shape, f"{node.format_node()}: {tuple(v.shape)} is not {declared}"
            out.append(v.contiguous())
        return type(value)(out) if isinstance(value, (tuple, list)) else out[0]
