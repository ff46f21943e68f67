"""What a kernel raises for a bad value: exception class and message as PyTorch words them, {value} filled in at run
time."""

from __future__ import annotations

from nova.fusion.records import Function, Op


def op_message(op: Op) -> str | None:
    """The error of one op, or None if no value is bad for it."""
    if op.name == "take":
        rows = op.operands[0].shape[0]
        return f"IndexError: index {{value}} is out of range for dimension 0 with size {rows}"
    if op.name == "take_backward":
        return f"IndexError: index {{value}} is out of range for dimension 0 with size {op.attrs['rows']}"
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
    if op.name in ("sce", "sce_backward", "sce_merge"):
        return "IndexError: Target {value} is out of bounds."
    if op.name in ("floordiv", "rem", "truncdiv", "fmod") and op.operands[0].dtype in ("i64", "i32", "i16", "i8", "u8"):
        return "RuntimeError: ZeroDivisionError"
    return None


def message(function: Function) -> str | None:
    """The error of a kernel; a general wording where its ops have different ones."""
    found = list(dict.fromkeys(text for op in function.ops if (text := op_message(op))))
    if len(found) > 1:
        return "IndexError: index {value} is out of range"
    return found[0] if found else None
