"""outline-kernels: one function per distinct group, and @step as a list of calls.

    %1 = nova.linear(%0, ..) {nova.group = 1}          module @kernels { func.func private @linear_gelu_0(..) {..} }
    %2 = nova.gelu(%1) {nova.group = 1}          ->    func.func private @linear_gelu_0(..) -> ..  (declaration)
    ... 12 layers of it                                %1:2 = call @linear_gelu_0(%0, ..)  12 times

Groups are equal if their ops, attributes, types, wiring and the views of their operands are; the key is computed from
records, so a deep model costs little more than a shallow one. Bodies stand in a nested module: the calls keep the
step's types, and later passes are free to give a kernel's arguments other shapes over the same buffers.

Also carried by the declarations, for the memory plan and the step program: `nova.kernel`, `nova.inplace`,
`nova.raises`, and for multi-tensor kernels `nova.count` (how many tensors) and `nova.body` (the kernel, shared by all
counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nova.fusion import batching, inplace, raises, records
from nova.fusion.dispatch import GROUP, KIND
from nova.fusion.records import Function, Op, Value
from nova.fusion.space import VIEWS, is_generator
from nova.mlir import ir

MAX_NAME = 40
WHOLE = frozenset({"scatter", "scan"})  # kinds whose op reads its operands as they are, without views in the kernel


@dataclass
class Call:
    """One kernel launch: what it reads and makes, as values of the step."""

    kind: str
    ops: list[Op]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    symbol: str = ""


@dataclass(frozen=True)
class KernelText:
    """A distinct kernel of an outlined step: `text` is a module that holds it alone, for the kernel stages."""

    name: str
    kind: str
    calls: int
    text: str


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Outlines the groups of @step."""
    step = records.step_function(module)
    if step is None:
        return module
    function = records.read(step)
    others = [str(op) for op in module.body.operations if op != step]
    return ir.Module.parse(module_text(function, others))


def kernels(module: ir.Module) -> list[KernelText]:
    """The distinct kernels of an outlined module, with how often @step calls each."""
    calls: dict[str, int] = {}
    bodies: dict[str, str] = {}
    for op in module.body.operations:
        if op.operation.name == "func.func" and "nova.kernel" in op.attributes:
            name = ir.StringAttr(op.attributes["sym_name"]).value
            body = ir.StringAttr(op.attributes["nova.body"]).value if "nova.body" in op.attributes else name
            bodies[name] = body
            calls.setdefault(body, 0)
    step = records.step_function(module)
    for op in step.regions[0].blocks[0].operations if step is not None else ():
        if op.operation.name == "func.call":
            calls[bodies[ir.FlatSymbolRefAttr(op.operation.attributes["callee"]).value]] += 1
    found = []
    for op in kernel_functions(module):
        name = ir.StringAttr(op.attributes["sym_name"]).value
        kind = ir.StringAttr(op.attributes["nova.kernel"]).value
        found.append(KernelText(name, kind, calls.get(name, 0), f"module {{\n{op}\n}}"))
    return found


def bodies_of(module: ir.Module) -> dict[str, str]:
    """Callee symbol of @step -> name of the kernel that implements it."""
    result = {}
    for op in module.body.operations:
        if op.operation.name == "func.func" and "nova.kernel" in op.attributes:
            name = ir.StringAttr(op.attributes["sym_name"]).value
            result[name] = ir.StringAttr(op.attributes["nova.body"]).value if "nova.body" in op.attributes else name
    return result


def kernel_functions(module: ir.Module) -> list[ir.OpView]:
    """The kernel functions of a module: in its nested @kernels, or at its top level (kernel stages, tests)."""
    found = []
    for op in module.body.operations:
        if op.operation.name == "builtin.module":
            found += [f for f in op.regions[0].blocks[0].operations if "nova.kernel" in f.attributes]
        elif op.operation.name == "func.func" and "nova.kernel" in op.attributes and len(op.regions[0].blocks):
            found.append(op)
    return found


# --- the step ---------------------------------------------------------------------------------------------------------


class Outliner:
    """Turns the groups of one step into calls and distinct kernels."""

    def __init__(self, function: Function):
        self.function = function
        self.group_of: dict[Value, int] = {}
        self.bodies: dict[object, tuple[str, Function]] = {}
        self.declared: dict[object, str] = {}
        self.symbols: set[str] = {function.name}
        self.kernel_texts: list[str] = []
        self.declarations: list[str] = []

    def calls(self) -> list[Call | Op]:
        """The step in order: calls of kernels, and the ops that stay in the step."""
        order: dict[object, Call | Op] = {}
        for op in self.function.ops:
            if GROUP in op.attrs:
                number = op.attrs.pop(GROUP)
                kind = op.attrs.pop(KIND)
                call = order.setdefault(number, Call(kind, []))
                assert isinstance(call, Call)
                call.ops.append(op)
                self.group_of.update(dict.fromkeys(op.results, number))
            elif op.name not in VIEWS and not is_generator(op):
                order[op] = op
        self._find_outputs(order)
        return list(order.values())

    def base(self, value: Value) -> Value:
        while value.op is not None and value.op.name in VIEWS:
            value = value.op.operands[0]
        return value

    def _find_outputs(self, order: dict[object, Call | Op]) -> None:
        """A value is a result of its kernel if another kernel, the step's own ops or its return read it."""
        read: set[Value] = {self.base(value) for value in self.function.outputs}
        for number, item in order.items():
            for op in item.ops if isinstance(item, Call) else [item]:
                for operand in op.operands:
                    base = self.base(operand)
                    if self.group_of.get(base, None) != number or not isinstance(item, Call):
                        read.add(base)
        for item in order.values():
            if isinstance(item, Call):
                item.outputs = [value for op in item.ops for value in op.results if value in read]

    # --- one kernel -------------------------------------------------------------------------------------------------

    def outline(self, call: Call) -> None:
        """Finds or makes the kernel of a call, and its operands."""
        if call.kind == "multi_tensor":
            self._outline_batch(call)
            return
        key = self._key(call)
        found = self.bodies.get(key)
        if found is None:
            body = self._extract(call)
            found = self.bodies[key] = (body.name, body)
            self._print(call.kind, body)
        call.symbol = found[0]

    def _key(self, call: Call) -> object:
        """The structure of a group; fills `call.inputs` with what it reads, in order of first use."""
        numbers: dict[Value, object] = {}
        parts: list[object] = [call.kind]

        def number(value: Value) -> object:
            known = numbers.get(value)
            if known is not None:
                return known
            op = value.op
            if op is not None and call.kind not in WHOLE and (op.name in VIEWS or is_generator(op)):
                add(op)
                return numbers[value]
            call.inputs.append(value)
            numbers[value] = ("in", len(call.inputs), value.shape, value.dtype)
            return numbers[value]

        def add(op: Op) -> None:
            operands = tuple(number(value) for value in op.operands)
            position = len(parts)
            parts.append(
                (op.name, operands, tuple(sorted(op.attrs.items())), tuple((v.shape, v.dtype) for v in op.results))
            )
            for result in op.results:
                numbers[result] = (position, result.position)

        for op in call.ops:
            add(op)
        parts.append(tuple(numbers[value] for value in call.outputs))
        return tuple(parts)

    def _extract(self, call: Call) -> Function:
        """The kernel function of a group."""
        body = Function(self._name(call))
        copies: dict[Value, Value] = {}
        for value in call.inputs:
            argument = Value(value.shape, value.dtype)
            body.args.append(argument)
            copies[value] = argument

        def copy(op: Op) -> None:
            for operand in op.operands:
                if operand not in copies:
                    assert operand.op is not None
                    copy(operand.op)
            if op.name == "copy" and call.kind.startswith("attention"):
                copies[op.results[0]] = copies[op.operands[0]]  # it says in which layout attention writes a result
                return
            copied = Op(op.name, [copies[v] for v in op.operands], op.attrs)
            for result in op.results:
                copies[result] = copied.result(result.shape, result.dtype)
            body.ops.append(copied)

        for op in call.ops:
            copy(op)
        body.outputs = [copies[value] for value in call.outputs]
        body.link()
        return body

    def _name(self, call: Call) -> str:
        names = list(dict.fromkeys(op.name for op in call.ops if op.name != "copy")) or ["copy"]
        heavy = [n for n in names if n not in LIGHT] or names
        stem = "_".join(heavy)[:MAX_NAME].rstrip("_")
        return self._fresh(stem)

    def _fresh(self, stem: str) -> str:
        number = 0
        while f"{stem}_{number}" in self.symbols:
            number += 1
        self.symbols.add(f"{stem}_{number}")
        return f"{stem}_{number}"

    def _print(self, kind: str, body: Function) -> None:
        attrs = [f'nova.kernel = "{kind}"']
        pairs = inplace.pairs(body, kind) if kind in ("loops", "contraction") else []
        attrs.append(f"nova.inplace = [{', '.join(f'array<i64: {a}, {b}>' for a, b in pairs)}]")
        message = raises.message(body)
        if message:
            attrs.append(f"nova.raises = {records.attribute_text('str', message)}")
        self._emit(body, ", ".join(attrs))
        types = ", ".join(records.type_text(v.shape, v.dtype) for v in body.args)
        results = ", ".join(records.type_text(v.shape, v.dtype) for v in body.outputs)
        attributes = ", ".join(attrs)
        self.declarations.append(f"func.func private @{body.name}({types}) -> ({results}) attributes {{{attributes}}}")

    def _emit(self, body: Function, attrs: str) -> None:
        names: dict[Value, str] = {}
        for value in body.args:
            names[value] = f"%{len(names)}"
        lines = [records.op_text(op, names) for op in body.ops]
        body.attrs["sym_visibility"] = '"private"'
        self.kernel_texts.append(records.function_text(body, lines, names, attrs))

    def _outline_batch(self, call: Call) -> None:
        """A multi-tensor kernel: the body describes one tensor, the declaration counts them."""
        batch = batching.split(call.ops, call.outputs)
        call.inputs, call.outputs = batch.inputs, batch.outputs
        found = self.bodies.get(batch.key)
        if found is None:
            stem = "_".join(dict.fromkeys(op.name for op in batch.body.ops))[:MAX_NAME]
            batch.body.name = self._fresh(stem)
            found = self.bodies[batch.key] = (batch.body.name, batch.body)
            self._emit(batch.body, ", ".join(batch.attributes()))
        types = tuple((v.shape, v.dtype) for v in (*call.inputs, *call.outputs))
        key = (batch.key, types)
        if key not in self.declared:
            self.declared[key] = symbol = self._fresh(f"{found[0]}_of_{batch.count}")
            attributes = ", ".join([*batch.step_attributes(), f'nova.body = "{found[0]}"'])
            inputs = ", ".join(records.type_text(v.shape, v.dtype) for v in call.inputs)
            results = ", ".join(records.type_text(v.shape, v.dtype) for v in call.outputs)
            self.declarations.append(
                f"func.func private @{symbol}({inputs}) -> ({results}) attributes {{{attributes}}}"
            )
        call.symbol = self.declared[key]


LIGHT = frozenset({"cast", "reshape", "broadcast", "constant", "where", "neg"})


def module_text(function: Function, others: Sequence[str] = ()) -> str:
    """The outlined module of a grouped step."""
    outliner = Outliner(function)
    names: dict[Value, str] = {}
    lines: list[str] = []
    for value in function.args:
        names[value] = f"%{len(names)}"

    def define(value: Value) -> str:
        """The name of a value of the step; a reshape of one is metadata."""
        if value not in names:
            op = value.op
            assert op is not None and op.name in ("reshape", "constant"), f"{op} is not in memory"
            for operand in op.operands:
                define(operand)
            lines.append(records.op_text(op, names, location=True))
        return names[value]

    checked: set[raises.Check] = set()  # by earlier calls
    for item in outliner.calls():
        if isinstance(item, Op):
            for operand in item.operands:
                define(operand)
            lines.append(records.op_text(item, names, location=True))
            continue
        outliner.outline(item)
        operands = ", ".join([define(value) for value in item.inputs])
        inputs = ", ".join(records.type_text(v.shape, v.dtype) for v in item.inputs)
        for value in item.outputs:
            names[value] = f"%{len(names)}"
        results = ", ".join(records.type_text(v.shape, v.dtype) for v in item.outputs)
        left = ", ".join(names[v] for v in item.outputs)
        place = records.location_text(item.ops[0]) if item.ops[0].location else ""
        checks = raises.checks(item.ops)
        mark = " {nova.repeats}" if checks and checks <= checked else ""  # it finds nothing that is not known already
        checked |= checks
        call = f"func.call @{item.symbol}({operands}){mark} : ({inputs}) -> ({results}) {place}"
        lines.append(f"{left} = {call}" if left else call)
    for value in function.outputs:
        define(value)
    step = records.function_text(function, lines, names)
    bodies = "\n".join(outliner.kernel_texts)
    declarations = "\n".join(outliner.declarations)
    return "\n".join(["module {", *others, declarations, step, f"module @kernels {{\n{bodies}\n}}", "}"])
