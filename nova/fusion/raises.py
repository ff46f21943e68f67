"""What a kernel raises for a bad value: exception class and message as PyTorch words them, {value} filled in at run
time."""

from __future__ import annotations

from collections.abc import Iterable

from nova.fusion.records import Function, Op, Value

Check = tuple[object, ...]


def op_message(op: Op) -> str | None:
    """The error of one op, or None if no value is bad for it."""
    if op.name == "take":
        rows = op.operands[0].shape[0]
        return f"IndexError: index {{value}} is out of range for dimension 0 with size {rows}"
    if op.name == "take_backward":
        return f"IndexError: index {{value}} is out of range for dimension 0 with size {op.attrs['rows']}"
    if op.name in ("sce", "sce_backward", "sce_merge") or op.attrs.get("labels"):
        return "IndexError: Target {value} is out of bounds."
    if op.name in ("gather", "scatter"):
        dim = op.attrs["dim"]
        size = op.operands[0].shape[dim]
        return f"RuntimeError: index {{value}} is out of bounds for dimension {dim} with size {size}"
    if op.name in ("index", "index_put"):
        dims = op.attrs["dims"]
        where = (
            f"dimension {dims[0]} with size {op.operands[0].shape[dims[0]]}"
            if len(dims) == 1
            else f"dimensions {list(dims)}"
        )
        return f"IndexError: index {{value}} is out of bounds for {where}"
    if op.name in ("floordiv", "rem", "truncdiv", "fmod") and op.operands[0].dtype in ("i64", "i32", "i16", "i8", "u8"):
        return "RuntimeError: ZeroDivisionError"
    if op.name == "probability":
        return "RuntimeError: all elements of input and target should be between 0 and 1"
    return None


def checks(ops: Iterable[Op]) -> set[Check]:
    """What these ops check, each as (what, the values that are looked at): equal ones find the same bad values."""
    return {found for op in ops if (found := _check(op)) is not None}


def _check(op: Op) -> Check | None:
    if op_message(op) is None:
        return None
    if op.name in ("take", "take_backward"):
        rows = op.operands[0].shape[0] if op.name == "take" else op.attrs["rows"]
        return ("rows", rows, _looked_at(op.operands[1]))
    if op.name in ("gather", "scatter"):
        return ("dim", op.operands[0].shape[op.attrs["dim"]], _looked_at(op.operands[1]))
    if op.name in ("index", "index_put"):
        sizes = tuple(op.operands[0].shape[d] for d in op.attrs["dims"])
        first = 1 if op.name == "index" else 2
        return ("index", sizes, bool(op.attrs.get("wrap")), *map(_looked_at, op.operands[first:]))
    if op.name in ("sce", "sce_backward", "sce_merge"):
        position = {"sce": 1, "sce_backward": 2, "sce_merge": 3}[op.name]
        classes = op.attrs["classes"] if op.name == "sce_merge" else op.operands[position - 1].shape[1]
        return ("label", classes, op.attrs["ignore_index"], _looked_at(op.operands[position]))
    return (op.name, *map(_looked_at, op.operands))


def _looked_at(value: Value) -> Value:
    """The value whose elements these are, whatever their shape."""
    while value.op is not None and value.op.name in ("reshape", "transpose"):
        value = value.op.operands[0]
    return value


def message(function: Function) -> str | None:
    """The error of a kernel; a general wording where its ops have different ones."""
    found = list(dict.fromkeys(text for op in function.ops if (text := op_message(op))))
    if len(found) > 1:
        return "IndexError: index {value} is out of range"
    return found[0] if found else None
