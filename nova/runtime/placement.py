"""Where a step runs, and which of its values lie elsewhere.

The whole step runs on one device. Beside a GPU there is the CPU's memory: an optimizer's step counts, a batch that the
step itself moves, a loss that it returns with `.cpu()`. Such inputs and outputs are marked `host` here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nova.errors import UnsupportedError
from nova.runtime.device_program import can_count
from nova.runtime.step_plan import StepGraph

if TYPE_CHECKING:
    from nova.capture.signature import CapturedStep

# optimizer update -> which of its results is the step count
COUNTS = {"nova.adam.default": 4, "nova.adagrad.default": 2, "nova.rmsprop.default": 4}


def devices_of(captured: CapturedStep) -> list[str]:
    """The devices that a step touches, sorted."""
    found = {spec.type.device for spec in captured.signature.inputs}
    found |= {spec.type.device for spec in captured.signature.outputs}
    for node in captured.graph.nodes if captured.graph is not None else ():
        found.update(type_.device for type_ in _types(node.meta.get("type")))
    return sorted(found)


def _types(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _types(item)
    elif value is not None:
        yield value


def device_of(captured: CapturedStep) -> str:
    """Where the step runs: its GPU if it touches one, else "cpu"."""
    return the_device(devices_of(captured), captured.name)


def the_device(devices: list[str], name: str = "step") -> str:
    """The one device among these that is not the CPU; "cpu" if there is none."""
    others = [device for device in devices if device != "cpu"]
    if len(others) > 1:
        raise UnsupportedError(
            f"{name} has tensors on {' and '.join(others)}: a compiled step runs on one GPU. Put the model, the "
            "optimizer's state and the batch on the same device, or use one process a GPU"
        )
    if others and not others[0].startswith("cuda"):
        raise UnsupportedError(f"{name} has tensors on {others[0]}; Nova compiles for CPUs and NVIDIA GPUs")
    return others[0] if others else "cpu"


def place(graph: StepGraph, captured: CapturedStep, device: str) -> StepGraph:
    """Marks what lies in the CPU's memory while the step runs on `device`."""
    graph.device = device
    if device == "cpu" or devices_of(captured) == ["cpu"]:
        return graph
    inputs, outputs = captured.signature.inputs, captured.signature.outputs
    for value, spec in zip(graph.values, inputs, strict=False):  # the arguments come first
        value.host = value.kind == "tensor" and spec.type.device == "cpu"
    counted = _counted(captured)
    for output, said in zip(graph.outputs, outputs, strict=True):
        if output.state_of is None:
            output.host = said.type.device == "cpu"
        else:
            output.counts = said.input in counted and can_count(graph.values[output.state_of].dtype)
    return graph


def _counted(captured: CapturedStep) -> set[int]:
    """Inputs whose new contents are the old ones plus one: an optimizer's step counts."""
    found: set[int] = set()
    if captured.graph is None:
        return found
    nodes = list(captured.graph.nodes)
    places = {node: node.meta["input"] for node in nodes if node.op == "placeholder" and "input" in node.meta}
    results = nodes[-1].args[0]
    for node, spec in zip(results, captured.signature.outputs, strict=True):
        if spec.kind != "state" or spec.input is None or node.target is not operator.getitem:
            continue
        update, position = node.args
        name = str(update.target)
        if COUNTS.get(name) != position or update.kwargs.get("found_inf") is not None:
            continue
        step = update.args[{"nova.adagrad.default": 3}.get(name, 5)]
        if places.get(step) == spec.input:
            found.add(spec.input)
    return found
