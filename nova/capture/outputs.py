"""What a step returns, as a JSON-able tree whose leaves say where each value comes from.

    return {"loss": loss, "n": 3}    {"dict": [["loss", {"output": 0}], ["n", {"const": 3}]]}

Leaves: {"output": i} fresh tensor; {"float": i} Python number of a 0-d output; {"source": Source} an object that
exists outside the step (a parameter, an argument); {"window": {...}} a view of an input, over its memory as in eager
(`w.detach()`, `w[0]`), or of a fresh tensor, where several in its memory are returned (`y, y[0]`); {"const": value}.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nova.capture.scalars import TracedFloat
from nova.capture.signature import Source
from nova.capture.views import Geometry
from nova.errors import CaptureError

_CONSTANTS = (type(None), bool, int, float, str)


def _name(cls: type) -> list[str]:
    return [cls.__module__, cls.__qualname__]


def _find(name: Sequence[str]) -> Any:
    found: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        found = getattr(found, part)
    return found


def describe(
    value: Any,
    tensor: Callable[[Tensor], Any],
    number: Callable[[TracedFloat], Any],
    known: Callable[[Any], Source | None],
) -> Any:
    """The tree of a returned value."""

    def visit(v: Any) -> Any:
        if isinstance(v, Tensor):
            return tensor(v)
        if isinstance(v, TracedFloat):
            return number(v)
        if type(v) in _CONSTANTS:
            return {"const": v}
        if type(v) is tuple:
            return {"tuple": [visit(x) for x in v]}
        if type(v) is list:
            return {"list": [visit(x) for x in v]}
        if isinstance(v, torch.Size) or type(v).__module__ == "torch.return_types":
            return {"sequence": [*_name(type(v)), [visit(x) for x in v]]}
        if isinstance(v, tuple) and hasattr(v, "_fields"):
            return {"namedtuple": [*_name(type(v)), [visit(x) for x in v]]}
        if dataclasses.is_dataclass(v) and not isinstance(v, type):
            fields = [[f.name, visit(getattr(v, f.name))] for f in dataclasses.fields(v) if f.init]
            return {"dataclass": [*_name(type(v)), fields]}
        if isinstance(v, dict) and all(type(k) in (str, int) for k in v):
            items = [[k, visit(x)] for k, x in v.items()]
            return {"dict": items} if type(v) is dict else {"mapping": [*_name(type(v)), items]}
        source = known(v)
        if source is not None:
            return {"source": source}
        raise CaptureError(
            f"the step returns a {type(v).__name__}, which a replay cannot build again; return tensors, numbers, and "
            "tuples, lists, dicts or dataclasses of them"
        )

    return visit(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a returned value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def describe_window(g: Geometry, number: int = 0) -> dict[str, Any]:
    """A view of an input or an output. Which one, and where the view starts in it, is known at the end of a recording.
    `number` tells the views of one step apart."""
    offset, size, stride, dtype, bits = g
    name = str(dtype).removeprefix("torch.")
    return {
        "number": number, "size": list(size), "stride": list(stride), "offset": offset, "dtype": name, "bits": bits,
    }  # fmt: skip


def window(base: Tensor, view: Mapping[str, Any]) -> Tensor:
    """The described view of an input or an output, which is dense, or the flat span of a storage."""
    flat, dtype = base.detach().as_strided((base.numel(),), (1,)), getattr(torch, view["dtype"])
    if flat.dtype != dtype:
        flat = flat.view(dtype)
    found = flat.as_strided(view["size"], view["stride"], flat.storage_offset() + view["offset"])
    if view["bits"] & 1:
        found = found.conj()
    return torch._neg_view(found) if view["bits"] & 2 else found


def rebuild(
    tree: Any, outputs: Sequence[Any], resolve: Callable[[Source], Any], view: Callable[[Mapping[str, Any]], Any]
) -> Any:
    """The returned value of a replay."""

    def visit(tree: Any) -> Any:
        ((kind, value),) = tree.items()
        match kind:
            case "output":
                return outputs[value]
            case "float":
                return float(outputs[value])
            case "const":
                return value
            case "source":
                return resolve(value)
            case "window":
                return view(value)
            case "tuple":
                return tuple(map(visit, value))
            case "list":
                return list(map(visit, value))
            case "dict":
                return {k: visit(v) for k, v in value}
            case "mapping":
                items = {k: visit(v) for k, v in value[2]}
                return _find(value)(**items) if _keywords(value) else _find(value)(items)
            case "sequence":
                return _find(value)([*map(visit, value[2])])
            case "namedtuple":
                return _find(value)(*map(visit, value[2]))
            case "dataclass":
                return _find(value)(**{k: visit(v) for k, v in value[2]})
        raise ValueError(f"unknown kind of output {kind!r}")

    return visit(tree)


def _keywords(value: Any) -> bool:
    return dataclasses.is_dataclass(_find(value))
