"""configure: derives every kernel's schedule from its shapes and the target, and writes it on the kernel.

    func.func private @k(...) attributes {nova.kernel = "contraction", ...}
      -> {..., lowering_config = {kind = "tiled", workgroup = array<i64: 132, 1360>, reduction = 384 : i64,
                                  subgroup = array<i64: 6, 16>, threads = 2 : i64, ..., predicted_seconds = ... : f64}}

Reads level-2 kernels only; changes nothing but that attribute. Code generation takes its tiles from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from nova.mlir import int_array, ir
from nova.schedule import config, model
from nova.schedule import target as targets
from nova.schedule.bandwidth import LoopProblem, schedule_list, schedule_loops
from nova.schedule.target import ELEMENT_BYTES, Target


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Configures all kernels of `module`. `options` is a Target, something with `.target`, a target's name or None."""
    target = target_of(options)
    with module.context, ir.Location.unknown():
        for kernel in kernels(module.operation):
            schedule = schedule_kernel(kernel, target)
            if reason := getattr(options, "reason", ""):  # why there is less to use than the target has: gpu/fit.py
                schedule = dataclasses.replace(schedule, reasons=(*schedule.reasons, reason))
            config.write(kernel.operation, schedule)
    return module


def target_of(options: Any) -> Target:
    """The target that pass options name; the host if they name none."""
    named = getattr(options, "target", options)
    if isinstance(named, dict):
        named = named.get("target")
    if isinstance(named, Target):
        return named
    return targets.by_name(named) if isinstance(named, str) and named else targets.host()


def kernels(op: ir.Operation) -> Iterator[ir.OpView]:
    """Functions with a body that carry `nova.kernel`, at any depth of modules."""
    for region in op.regions:
        for block in region:
            for view in block:
                child = view.operation
                if child.name == "builtin.module":
                    yield from kernels(child)
                elif "nova.kernel" in child.attributes and len(child.regions[0].blocks):
                    yield view


def schedule_kernel(kernel: ir.OpView, target: Target) -> Any:
    """The schedule of one kernel, by its kind."""
    kind = ir.StringAttr(kernel.operation.attributes["nova.kernel"]).value
    if kind == "contraction":
        from nova.fusion import contraction_form, contraction_tiles
        from nova.schedule.contraction import schedule_contraction

        form = contraction_form.read(kernel)
        problem = contraction_tiles.tiled_problem(form) if target.is_gpu else contraction_form.problem_of(form)
        return schedule_contraction(problem, target)
    if kind in ("attention_forward", "attention_backward"):
        return _schedule_attention(kernel, target)
    if kind == "multi_tensor":
        return schedule_list(target)
    return schedule_loops(loop_problem(kernel), target)


def _schedule_attention(kernel: ir.OpView, target: Target) -> Any:
    from nova.fusion import attention_form
    from nova.schedule.attention import schedule_attention

    for view in _walk(kernel.operation):
        if attention_form.is_attention(view):
            return schedule_attention(attention_form.read_op(view).problem(), target)
    return schedule_loops(loop_problem(kernel), target)


def _walk(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region:
            for view in block:
                yield view.operation
                yield from _walk(view.operation)


# --- memory-bound kernels --------------------------------------------------------------------------------------------


def loop_problem(kernel: ir.OpView) -> LoopProblem:
    """Totals of a kernel: its arguments' bytes once each, its regions' operations once a point."""
    function = kernel.operation
    block = function.regions[0].blocks[0]
    arguments = [argument.type for argument in block.arguments]
    results = len(block.operations[len(block.operations) - 1].operation.operands)
    inputs, outputs = arguments[: len(arguments) - results], arguments[len(arguments) - results :]
    sizes = int_array(function.attributes["nova.dims"]) if "nova.dims" in function.attributes else []
    row_dims = int_array(function.attributes["nova.rows"]) if "nova.rows" in function.attributes else []
    rows = math.prod(sizes[d] for d in row_dims)
    operations, columns, row_reductions, cross = 0.0, 1, 0, False
    for view in block:
        op = view.operation
        if op.name != "linalg.generic":
            continue
        dims = int_array(op.attributes["dims"])
        points = math.prod(sizes[d] for d in dims)
        columns = max(columns, points // max(rows, 1))
        operations += points * (1.0 + region_cost(op))
        reduced = {d for d, kind in zip(dims, op.attributes["iterator_types"], strict=True) if "reduction" in str(kind)}
        cross |= bool(reduced & set(row_dims))
        row_reductions += bool(reduced - set(row_dims))
    element = _element(outputs[0]) if outputs else "f32"
    if not sizes:  # scatter, scan, multi-tensor: one pass over what there is
        operations = 4.0 * sum(_elements(t) for t in outputs)
        rows = columns = max((_elements(t) for t in outputs), default=1)
    return LoopProblem(
        max(rows, 1), columns, sum(_bytes(t) for t in inputs), sum(_bytes(t) for t in outputs), operations,
        element if element in ELEMENT_BYTES else "f32", row_reductions, cross,
    )  # fmt: skip


def region_cost(op: ir.Operation) -> float:
    """Weighted operations of a region, for one point."""
    return sum(model.OPERATION_COST.get(view.operation.name, 1.0) for view in op.regions[0].blocks[0].operations)


def _element(type_: ir.Type) -> str:
    return str(type_.element_type) if isinstance(type_, ir.ShapedType) else str(type_)


def _elements(type_: ir.Type) -> int:
    """Elements of a tensor; a dynamic extent counts as one."""
    if not isinstance(type_, ir.ShapedType):
        return 1
    return math.prod(extent if extent > 0 else (0 if extent == 0 else 1) for extent in type_.shape)


def _bytes(type_: ir.Type) -> int:
    return _elements(type_) * ELEMENT_BYTES.get(_element(type_).replace("ui", "i"), 4)
