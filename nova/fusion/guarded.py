"""Marks the kernels of a GPU's step that may do nothing once the step has found an error: those that write its state.

    func.func private @adam_0(..) attributes {nova.kernel = "multi_tensor", ..}    ->    {.., nova.guarded}

A label out of range is found while the step runs, and nobody waits for a GPU. So that parameters, optimizer state,
buffers and kept gradients stay as they were before such a step, a kernel that writes them begins by looking at the
step's flag (nova/tile/generate.py). Steps in which nothing can be found are left as they are.
"""

from __future__ import annotations

from typing import Any

from nova.fusion import outline, records
from nova.mlir import ir
from nova.tile.generate import GUARDED


def mark(module: ir.Module) -> None:
    """Marks the kernels of an outlined module whose results replace lifted state."""
    step = records.step_function(module)
    if step is None:
        return
    bodies, declared = outline.bodies_of(module), _declarations(module)
    calls = [op.operation for op in step.regions[0].blocks[0].operations if op.operation.name == "func.call"]
    finding = [number for number, call in enumerate(calls) if _finds(call, declared[_callee(call)])]
    if not finding:
        return
    finders = {bodies[_callee(calls[number])] for number in finding}  # they write their own record, not the step's
    late = set(calls[finding[-1] + 1 :])  # what is written earlier is copied into place at the end
    written = {bodies[_callee(call)] for call in _writers(step) if call in late} - finders
    for symbol, function in declared.items():
        if bodies[symbol] in written:
            function.attributes[GUARDED] = ir.UnitAttr.get()
    for function in outline.kernel_functions(module):
        if _symbol(function) in written:
            function.attributes[GUARDED] = ir.UnitAttr.get()


def _finds(call: ir.Operation, function: Any) -> bool:
    """Whether a call may be the first that finds some error."""
    return "nova.raises" in function.attributes and "nova.repeats" not in call.attributes


def _declarations(module: ir.Module) -> dict[str, Any]:
    """The functions that @step calls, by symbol."""
    functions = (op for op in module.body.operations if op.operation.name == "func.func")
    return {_symbol(op): op for op in functions if "nova.kernel" in op.attributes}


def _symbol(function: Any) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value


def _callee(call: ir.Operation) -> str:
    return call.attributes["callee"].value


def _writers(step: Any) -> list[ir.Operation]:
    """The calls whose results the step returns as new state."""
    block = step.regions[0].blocks[0]
    *_, last = block.operations
    attributes = list(step.attributes["arg_attrs"]) if "arg_attrs" in step.attributes else []
    donated = {ir.IntegerAttr(a["nova.donates"]).value for a in attributes if "nova.donates" in a}
    found = []
    for position, value in enumerate(last.operation.operands):
        while position in donated and isinstance(value.owner, (ir.Operation, ir.OpView)):
            operation = value.owner.operation
            if operation.name == "nova.reshape":
                value = operation.operands[0]
                continue
            if operation.name == "func.call":
                found.append(operation)
            break
    return found
