"""Unrolls a short loop whose index selects what is computed: the "which piece" loop of a concatenation.

out[p, j] = select(p == 0, -x[1, j], x[0, j])  dims = [p, j]  ->  out[0, j] = -x[1, j]; out[1, j] = x[0, j]  dims = [j]
"""

from __future__ import annotations

import functools

from nova.fusion.kernel import Expr, Index, Kernel, Linear, Out, Structured, Tensor, const, expr, load

MAX_EXTENT = 4


def unroll_selected(kernel: Kernel) -> None:
    """Unrolls every loop that an op compares with constants to select a piece."""
    for loop in selecting_loops(kernel):
        chosen = affected(kernel, loop)
        rows = set(kernel.rows)
        if all(loop not in op.reduced and not op.reduced & rows for op in chosen):
            unroll(kernel, loop, chosen)


def selecting_loops(kernel: Kernel) -> list[int]:
    """Loops of at most MAX_EXTENT whose index is compared with a constant."""
    found: dict[int, None] = {}
    for op in kernel.ops:
        found.update(dict.fromkeys(loop for loop in selected_by(op) if 1 < kernel.loops[loop] <= MAX_EXTENT))
    return list(found)


def selected_by(op: Structured) -> list[int]:
    """Loops whose index the op compares with constants."""
    found = []
    for node in op.nodes():
        if node.op == "arith.cmpi" and node.args[0].op == "linear":
            loop = node.args[0].attr.single()
            constant = node.args[1].op == "const" or (node.args[1].op == "linear" and not node.args[1].attr.terms)
            if loop is not None and constant:
                found.append(loop)
    return found


def affected(kernel: Kernel, loop: int) -> list[Structured]:
    """The ops that select by `loop`, and those they share locals with that have it as a dimension."""
    chosen = [op for op in kernel.ops if loop in selected_by(op)]
    while True:
        locals_ = {
            tensor for op in chosen for tensor, index in _locals(op) if any(item.single() == loop for item in index)
        }
        more = [op for op in kernel.ops if op in chosen or any(tensor in locals_ for tensor, _ in _locals(op))]
        if len(more) == len(chosen):
            return chosen
        chosen = more


def _locals(op: Structured) -> list[tuple[Tensor, Index]]:
    accesses = [*op.loads(), *((out.tensor, out.index) for out in op.outs)]
    return [(tensor, index) for tensor, index in accesses if tensor.kind == "local"]


def unroll(kernel: Kernel, loop: int, chosen: list[Structured]) -> None:
    """Replaces each of the ops by one op for each value of `loop`."""
    locals_: dict[tuple[Tensor, int], Tensor] = {}

    def fixed(item: Linear, value: int) -> Linear:
        coefficient = dict(item.terms).get(loop, 0)
        return Linear(item.const + coefficient * value, tuple(term for term in item.terms if term[0] != loop))

    def access(tensor: Tensor, index: Index, value: int) -> tuple[Tensor, Index]:
        if tensor.kind != "local":
            return tensor, tuple(fixed(item, value) for item in index)
        if all(item.single() != loop for item in index):
            return tensor, index
        key = (tensor, value)
        if key not in locals_:
            shape = tuple(n for n, item in zip(tensor.shape, index, strict=True) if item.single() != loop)
            locals_[key] = Tensor("local", shape, tensor.dtype)
        return locals_[key], tuple(item for item in index if item.single() != loop)

    def at(node: Expr, value: int) -> Expr | None:
        if node.op == "load":
            tensor, index = node.attr
            return load(*access(tensor, index, value))
        if node.op == "linear":
            item = fixed(node.attr, value)
            return const(item.const, "index") if not item.terms else expr("linear", (), "index", item)
        if node.op == "arith.cmpi" and all(arg.op == "const" for arg in node.args) and node.attr in ("eq", "ne"):
            equal = node.args[0].attr == node.args[1].attr
            return const(int(equal == (node.attr == "eq")), "i1")
        if node.op == "arith.select" and node.args[0].op == "const":
            return node.args[1] if node.args[0].attr else node.args[2]
        return None

    ops: list[Structured] = []
    for op in kernel.ops:
        if op not in chosen:
            ops.append(op)
            continue
        for value in range(kernel.loops[loop]):
            outs = [Out(*access(o.tensor, o.index, value), o.value, o.combine, o.init) for o in op.outs]
            loops = tuple(other for other in op.loops if other != loop)
            copy = Structured(loops, op.reduced, outs, list(op.checks), op.contraction)
            copy.map(functools.partial(at, value=value))
            ops.append(copy)
    kernel.ops = ops
    kernel.rows = [row for row in kernel.rows if row != loop]
