"""A schedule as the `lowering_config` dictionary of a kernel, and back.

    ContractionSchedule(kind="tiled", workgroup=(96, 4080), ...)   <->   lowering_config = {kind = "tiled",
                                                                          workgroup = array<i64: 96, 4080>, ...}

Any frozen dataclass of ints, floats, strings, booleans and tuples of them works; the field names are the attribute's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from nova.mlir import ir

T = TypeVar("T")
NAME = "lowering_config"
RENAMED = {"seconds": "predicted_seconds"}  # field of the record -> key of the attribute


def _attribute(value: Any) -> ir.Attribute:
    i64 = ir.IntegerType.get_signless(64)
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(i64, value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F64Type.get(), value)
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, tuple) and value and all(type(x) is int for x in value):
        return ir.DenseI64ArrayAttr.get(list(value))
    if isinstance(value, tuple):
        return ir.ArrayAttr.get([_attribute(x) for x in value])
    raise TypeError(f"no attribute for {value!r}")


def _python(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        return tuple(int(x) for x in attribute)
    if isinstance(attribute, ir.ArrayAttr):
        return tuple(_python(x) for x in attribute)
    if isinstance(attribute, (ir.BoolAttr, ir.IntegerAttr, ir.FloatAttr, ir.StringAttr)):
        return attribute.value
    raise TypeError(f"no value for {attribute}")


def write(op: ir.Operation, schedule: Any) -> None:
    """Sets `lowering_config` of a kernel to a schedule."""
    names = [field.name for field in dataclasses.fields(schedule)]
    op.attributes[NAME] = ir.DictAttr.get(
        {RENAMED.get(name, name): _attribute(getattr(schedule, name)) for name in names}
    )


def plain(op: ir.Operation) -> dict[str, Any]:
    """The kernel's `lowering_config` as Python values; empty if it carries none."""
    if NAME not in op.attributes:
        return {}
    return {named.name: _python(named.attr) for named in _items(ir.DictAttr(op.attributes[NAME]))}


def read(op: ir.Operation, record: type[T]) -> T | None:
    """The schedule in `lowering_config`, or None if the kernel carries none of this record's."""
    stored = plain(op)
    names = {RENAMED.get(field.name, field.name): field.name for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    if not stored or not set(stored) <= set(names):
        return None
    return record(**{names[key]: value for key, value in stored.items()})


def _items(attributes: ir.DictAttr) -> list[ir.NamedAttribute]:
    return [attributes[i] for i in range(len(attributes))]
