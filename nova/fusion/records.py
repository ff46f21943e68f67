"""Plain Python records of a function of `nova` ops, read in one walk and written back as text.

Walking MLIR through the bindings costs tens of microseconds an op, so the grouping and outlining passes read the step
once, think in records, and print. Names, types and attributes survive the round trip; SSA names do not.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from nova.dialect.base import REGISTRY, SEGMENT_SIZES, attribute_value, segment_texts
from nova.dialect.types import BYTES, MLIR_NAMES, Shape, describe, numel
from nova.mlir import ir


class Value:
    """An SSA value: an argument (`op` is None) or a result of `op`. `users` holds the ops that read it."""

    __slots__ = ("dtype", "op", "position", "shape", "users")

    def __init__(self, shape: Shape, dtype: str, op: Op | None = None, position: int = 0):
        self.shape, self.dtype, self.op, self.position = shape, dtype, op, position
        self.users: list[Op] = []

    @property
    def bytes(self) -> int:
        return numel(self.shape) * BYTES[self.dtype]

    def __repr__(self) -> str:
        return f"{self.op.name if self.op else 'arg'}:{self.dtype}{list(self.shape)}"


class Op:
    """A `nova` op. `name` has no dialect prefix for nova ops; `order` is its place in the program."""

    __slots__ = ("attrs", "location", "name", "operands", "order", "results")

    def __init__(
        self, name: str, operands: Sequence[Value], attrs: dict[str, Any], location: str = "", order: float = 0
    ):
        self.name, self.operands, self.attrs = name, list(operands), attrs
        self.location, self.order = location, order
        self.results: list[Value] = []

    def result(self, shape: Shape, dtype: str) -> Value:
        value = Value(shape, dtype, self, len(self.results))
        self.results.append(value)
        return value

    def __repr__(self) -> str:
        return f"nova.{self.name}({', '.join(map(repr, self.operands))})"


class Function:
    """A function in program order. `arg_attrs`, `res_attrs` and `attrs` are kept as text."""

    def __init__(self, name: str):
        self.name = name
        self.args: list[Value] = []
        self.ops: list[Op] = []
        self.outputs: list[Value] = []
        self.arg_attrs: list[str] = []
        self.res_attrs: list[str] = []
        self.attrs: dict[str, str] = {}

    def link(self) -> None:
        """Recomputes `users` and `order`."""
        for value in self.args:
            value.users = []
        for order, op in enumerate(self.ops):
            op.order = order
            for value in op.results:
                value.users = []
        for op in self.ops:
            for value in dict.fromkeys(op.operands):
                value.users.append(op)


def make(name: str, operands: Sequence[Value], shape: Shape, dtype: str, like: Op | None = None, **attrs: Any) -> Op:
    """A new op with one result, at the location of `like`."""
    op = Op(name, operands, attrs, like.location if like else "", like.order if like else 0)
    op.result(shape, dtype)
    return op


def function_named(module: ir.Module, name: str) -> ir.OpView | None:
    """The function `name` of the module's top level."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and ir.StringAttr(op.attributes["sym_name"]).value == name:
            return op
    return None


def step_function(module: ir.Module) -> ir.OpView | None:
    """@step, or the one public function with a body that is not a kernel."""
    named = function_named(module, "step")
    if named is not None:
        return named
    for op in module.body.operations:
        if op.operation.name == "func.func" and op.regions[0].blocks and "nova.kernel" not in op.attributes:
            return op
    return None


def read(func_op: ir.OpView) -> Function:
    """Reads a function whose body is `nova` ops (and calls, which are kept as they are)."""
    function = Function(ir.StringAttr(func_op.attributes["sym_name"]).value)
    block = func_op.regions[0].blocks[0]
    values: dict[ir.Value, Value] = {}
    for argument in block.arguments:
        described = describe(argument.type)
        value = Value(described.shape, described.dtype)
        function.args.append(value)
        values[argument] = value
    for key in ("arg_attrs", "res_attrs"):
        if key in func_op.attributes:
            setattr(function, key, [str(a) for a in ir.ArrayAttr(func_op.attributes[key])])
    for name, attribute in func_op.attributes.items():
        if name not in ("sym_name", "function_type", "arg_attrs", "res_attrs"):
            function.attrs[name] = str(attribute)
    for view in block.operations:
        operation = view.operation
        name = operation.name
        operands = [values[v] for v in operation.operands]
        if name == "func.return":
            function.outputs = operands
            break
        attrs = {
            key: attribute_value(attribute)
            for key, attribute in operation.attributes.items()
            if key not in SEGMENT_SIZES
        }
        op = Op(name.removeprefix("nova."), operands, attrs, operation.location)
        for result in operation.results:
            static = describe(result.type) if _static(result.type) else None
            values[result] = op.result(static.shape, static.dtype) if static else _dynamic(op, result.type)
        function.ops.append(op)
    function.link()
    return function


def _static(type_: ir.Type) -> bool:
    return isinstance(type_, ir.RankedTensorType) and type_.has_static_shape


def _dynamic(op: Op, type_: ir.Type) -> Value:
    """A result whose size is known at run time only (of an aten_call): -1 stands for the unknown extents."""
    tensor = ir.RankedTensorType(type_)
    shape = tuple(-1 if tensor.is_dynamic_dim(axis) else tensor.shape[axis] for axis in range(tensor.rank))
    names = {mlir: short for short, mlir in MLIR_NAMES.items()}
    return op.result(shape, names[str(tensor.element_type)])


# --- printing -------------------------------------------------------------------------------------------------------


def type_text(shape: Iterable[int], dtype: str) -> str:
    """The MLIR spelling of a tensor type; -1 is an unknown extent."""
    return "tensor<" + "x".join([*("?" if n < 0 else str(n) for n in shape), MLIR_NAMES[dtype]]) + ">"


def float_text(number: float) -> str:
    """A float literal of type f64 that parses back to the same number."""
    if not math.isfinite(number):
        return f"0x{struct.unpack('>Q', struct.pack('>d', number))[0]:016X} : f64"
    return f"{number:.17e} : f64"


def attribute_text(kind: str | None, value: Any) -> str:
    """The text of an attribute of a `nova` op from its Python value."""
    if isinstance(value, ir.Attribute):
        return str(value)
    if kind is None:
        kind = {bool: "bool", int: "int", float: "float", str: "str", tuple: "ints"}[type(value)]
    if kind == "int":
        return f"{value} : i64"
    if kind == "float":
        return float_text(value)
    if kind == "bool":
        return "true" if value else "false"
    if kind == "ints":
        return f"array<i64{': ' if value else ''}{', '.join(map(str, value))}>"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def op_text(op: Op, names: dict[Value, str], location: bool = False, extra: str = "") -> str:
    """One op in MLIR's generic form; `names` gives its operands' names and receives its results'."""
    spec = REGISTRY.get(op.name)
    kinds = spec.attrs if spec else {}
    attrs = [f"{key} = {attribute_text(kinds.get(key), value)}" for key, value in op.attrs.items()]
    operand_types, result_types = ([(v.shape, v.dtype) for v in values] for values in (op.operands, op.results))
    attrs += segment_texts(op.name, operand_types, result_types, op.attrs)
    if extra:
        attrs.append(extra)
    operands = ", ".join(names[v] for v in op.operands)
    types = ", ".join(type_text(v.shape, v.dtype) for v in op.operands)
    results = ", ".join(type_text(v.shape, v.dtype) for v in op.results)
    left = ""
    for value in op.results:
        names[value] = f"%{len(names)}"
    if op.results:
        left = ", ".join(names[v] for v in op.results) + " = "
    dialect_name = op.name if "." in op.name else f"nova.{op.name}"
    text = f'{left}"{dialect_name}"({operands}) {{{", ".join(attrs)}}} : ({types}) -> ({results})'
    return text + (f" {location_text(op)}" if location and op.location else "")


def location_text(op: Op) -> str:
    """`loc(...)` of the op, as MLIR prints it."""
    if not isinstance(op.location, str):  # printing one takes as long as reading the op
        op.location = str(op.location)
    return op.location if op.location.startswith("loc(") else f"loc({op.location})"


def place(op: Op) -> str:
    """The op's source position for reports: "file:line" or a name, without the loc(...) around it."""
    text = location_text(op)[4:-1] if op.location else ""
    return "" if text == "unknown" else text


def function_text(function: Function, body: Sequence[str], names: dict[Value, str], attrs: str = "") -> str:
    """A whole function from printed ops; `names` must name its arguments and outputs."""
    arguments = []
    for position, value in enumerate(function.args):
        extra = (
            f" {function.arg_attrs[position]}" if function.arg_attrs and function.arg_attrs[position] != "{}" else ""
        )
        arguments.append(f"{names[value]}: {type_text(value.shape, value.dtype)}{extra}")
    results = []
    for position, value in enumerate(function.outputs):
        extra = (
            f" {function.res_attrs[position]}" if function.res_attrs and function.res_attrs[position] != "{}" else ""
        )
        results.append(type_text(value.shape, value.dtype) + extra)
    visibility = "private " if function.attrs.get("sym_visibility") == '"private"' else ""
    own = ", ".join(f"{key} = {text}" for key, text in function.attrs.items() if key != "sym_visibility")
    own = ", ".join(part for part in (own, attrs) if part)
    attributes = f" attributes {{{own}}}" if own else ""
    returned = ", ".join(names[v] for v in function.outputs)
    types = ", ".join(type_text(v.shape, v.dtype) for v in function.outputs)
    lines = "\n".join(f"  {line}" for line in body)
    head = f"func.func {visibility}@{function.name}({', '.join(arguments)}) -> ({', '.join(results)}){attributes}"
    return f"{head} {{\n{lines}\n  return {returned}{' : ' + types if types else ''}\n}}"


def plain_text(function: Function) -> str:
    """A function with its ops as they stand."""
    names: dict[Value, str] = {}
    for value in function.args:
        names[value] = f"%{len(names)}"
    lines = [op_text(op, names, location=True) for op in function.ops]
    return function_text(function, lines, names)
