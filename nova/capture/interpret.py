"""Runs a captured graph in PyTorch, node by node: the backend that tells a bug of capture from one of the compiler.

nova.jit(backend="interpret")      guards, binding, effects and outputs as always; the graph one node at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nova.capture import keep as _keep  # noqa: F401  (registers the nova operators)
from nova.capture import optimizer_ops as _optimizer_ops  # noqa: F401
from nova.capture.signature import CapturedStep
from nova.runtime import placement

# In a graph their offsets count from the start of the value; PyTorch counts from the start of its memory.
_ABSOLUTE = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


class Interpreted:
    """Called like `runtime.executable.Executable`."""

    def __init__(self, step: CapturedStep):
        self.signature, self._device = step.signature, placement.device_of(step)
        self._nodes = list(step.graph.nodes)
        last: dict[fx.Node, int] = {}
        for position, node in enumerate(self._nodes):
            last.update(dict.fromkeys(node.all_input_nodes, position))
        self._dead: list[list[fx.Node]] = [[] for _ in self._nodes]  # values not needed after each node
        for node, position in last.items():
            self._dead[position].append(node)

    def reserve(self) -> None:
        """Nothing is held between calls."""

    def __call__(
        self, inputs: Sequence[torch.Tensor], scalars: Sequence[float] = (), seed: int = 0
    ) -> list[torch.Tensor]:
        tensors, numbers = iter(inputs), iter(scalars)
        values: list[Any] = []
        for spec in self.signature.inputs:
            if spec.role == "scalar":
                values.append(torch.tensor(next(numbers), dtype=torch.float64))
            elif spec.role == "seed":
                values.append(torch.tensor(seed, device=self._device))
            else:
                values.append(next(tensors).data)  # whose version is its own: writes are counted by the caller
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            results = self._evaluate(values)
            results = [result.clone() for result in results]  # an output may be an input that another output replaces
            fresh = []
            for output, result in zip(self.signature.outputs, results, strict=True):
                if output.kind == "state":
                    assert output.input is not None
                    values[output.input].copy_(result)
                elif output.strides is not None and result.stride() != tuple(output.strides):
                    empty = torch.empty_strided(result.shape, output.strides, dtype=result.dtype, device=result.device)
                    fresh.append(empty.copy_(result))
                else:
                    fresh.append(_dense(result) if output.strides is None else result)
        return fresh

    def _evaluate(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        values: dict[fx.Node, Any] = {}
        for node, dead in zip(self._nodes, self._dead, strict=True):
            if node.op == "placeholder":
                values[node] = inputs[node.meta["input"]]
            elif node.op == "output":
                return [values[found] for found in node.args[0]]  # type: ignore[union-attr]
            else:
                args = fx.map_arg(node.args, values.__getitem__)
                if node.target in _ABSOLUTE and args[0].storage_offset():
                    args = (args[0].clone(), *args[1:])
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                values[node] = _dense(node.target(*args, **kwargs))  # type: ignore[operator]
                for found in dead:
                    del values[found]
        raise ValueError("a captured graph has no output node")


def _dense(value: Any) -> Any:
    """Values of a graph are dense and row-major, whatever strides the operation gave them."""
    if isinstance(value, torch.Tensor):
        return value.contiguous() if value.layout is torch.strided else value
    return type(value)(map(_dense, value)) if isinstance(value, (tuple, list)) else value
