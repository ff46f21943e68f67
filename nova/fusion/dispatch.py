"""form-dispatches: decides which ops of the step share a kernel.

    %0 = nova.linear(%x, %w, %b)                  %0 = nova.linear(..) {nova.group = 0}
    %1 = nova.gelu(%0)                      ->    %1 = nova.gelu(%0) {nova.group = 0}
    %2 = nova.linear(%1, %w2, %b2)                %2 = nova.linear(..) {nova.group = 1}
    %3 = nova.layer_norm(%2, ..)                  %3 = nova.layer_norm(..) {nova.group = 2}

Afterwards every op with a kernel carries `nova.group`, the ops of a group are adjacent, and groups stand in the order
in which they run. Views and constants carry no group: they are part of whatever reads them. The rules are the paper's:

 - a producer fuses if everything that reads it can be in the same kernel, or if computing it again is cheaper than a
   round trip through memory;
 - nothing fuses into a contraction's operands; elementwise consumers over its own tile fold into its epilogue;
 - reductions fuse with elementwise producers and consumers over the same rows, and with column sums of these;
 - optimizer updates with equal hyperparameters are one kernel;
 - what would read a reduction's operand across memory, or close a cycle, is refused, and the report says so.
"""

from __future__ import annotations

from typing import Any

from nova.fusion import decisions, expand, records
from nova.fusion.former import Former
from nova.fusion.groups import Group
from nova.fusion.records import Function, Op, Value
from nova.fusion.space import VIEWS, is_generator
from nova.mlir import ir

GROUP = "nova.group"
KIND = "nova.kind"


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Annotates the ops of @step with the kernel they belong to."""
    step = records.step_function(module)
    if step is None:
        return module
    function = records.read(step)
    groups = form(function)
    texts = [function_text(function, groups) if op == step else str(op) for op in module.body.operations]
    return ir.Module.parse("module {\n" + "\n".join(texts) + "\n}")


def form(function: Function) -> list[Group]:
    """Groups the ops of `function`, in the order in which they run."""
    drop_dead(function)
    expand.expand(function)
    return Former(function, decisions.current()).run()


def drop_dead(function: Function) -> None:
    """Removes ops without effect whose results nobody reads."""
    needed = set(function.outputs)
    kept: list[Op] = []
    for op in reversed(function.ops):
        if op.name in ("aten_call", "bucket_ready", "func.call") or any(value in needed for value in op.results):
            needed.update(op.operands)
            kept.append(op)
    function.ops = kept[::-1]
    function.link()


def function_text(function: Function, groups: list[Group]) -> str:
    """@step with its ops in group order, each with its group."""
    names: dict[Value, str] = {}
    lines: list[str] = []
    for value in function.args:
        names[value] = f"%{len(names)}"

    def define(value: Value) -> None:
        """Prints the views and generators behind an operand where they are first needed."""
        if value in names or value.op is None:
            return
        for operand in value.op.operands:
            define(operand)
        assert value.op.name in VIEWS or is_generator(value.op), f"{value.op} is used before it is computed"
        lines.append(records.op_text(value.op, names, location=True))

    needed = live(function, groups)
    number = 0
    for group in groups:
        printed = False
        for op in group.ops:
            if op not in needed:
                continue
            for operand in op.operands:
                define(operand)
            extra = "" if group.kind == "step" else f'{GROUP} = {number} : i64, {KIND} = "{group.kind}"'
            lines.append(records.op_text(op, names, location=True, extra=extra))
            printed = True
        number += printed and group.kind != "step"
    for value in function.outputs:
        define(value)
    return records.function_text(function, lines, names)


def live(function: Function, groups: list[Group]) -> set[Op]:
    """Ops whose results reach an output or an op with an effect; others were left behind by recomputation."""
    needed: set[Op] = set()
    stack = [value.op for value in function.outputs if value.op is not None]
    stack += [op for group in groups if group.kind == "step" for op in group.ops if op.name != "constant"]
    while stack:
        op = stack.pop()
        if op in needed:
            continue
        needed.add(op)
        stack += [value.op for value in op.operands if value.op is not None]
    return needed
