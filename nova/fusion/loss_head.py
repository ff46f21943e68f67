"""split-loss-head: softmax cross entropy over a contraction becomes partials per tile of its columns and a small merge.

    %x = nova.linear(%h, %w)                       %x = nova.linear(%h, %w)
    %loss, %lse = nova.sce(%x, %t)          ->     %m, %s = nova.sce_partials(%x) {tile = 512}      (in the same kernel)
                                                   %loss, %lse = nova.sce_merge(%m, %s, %x, %t)

The row maximum and the sum of exponentials run along the axis that the contraction makes in tiles, so each tile's
share is taken while the tile is in registers or cache, and the logits are not read again for them. The shares do not
combine by adding: the merge rescales each sum by e**(maximum - row maximum). The tile is the one that the configurator
chooses for the contraction, a pure function of its shape, so this pass asks for the schedule before the kernel exists;
the kernel is scheduled later under the limit that its blocks may not cross these tiles, which reproduces it.

Logits that nothing else reads are never stored: the partials also pick the target's logit. It is done where the logits
do not fit the last-level cache; below that reading them again costs nothing.
"""

from __future__ import annotations

from typing import Any

from nova.fusion import decisions, records
from nova.fusion.records import Function, Op, Value
from nova.fusion.rules import CONTRACTIONS
from nova.fusion.space import VIEWS
from nova.mlir import ir
from nova.schedule import annotate
from nova.schedule.contraction import ContractionProblem, Operand, schedule_contraction

_EPILOGUE = frozenset({"add", "sub", "mul", "div", "cast", "tanh", "reshape"})
MAX_TILE, UNIT = 4096, 16


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Splits the loss heads of @step. `options` names the target, as for `configure`."""
    step = records.step_function(module)
    if step is None:
        return module
    names = {op.operation.name for op in step.regions[0].blocks[0].operations}
    if "nova.sce" not in names:
        return module
    function = records.read(step)
    target = annotate.target_of(options)
    if not split(function, target, target.is_gpu and getattr(options, "tf32", False)):
        return module
    texts = [records.plain_text(function) if op == step else str(op) for op in module.body.operations]
    return ir.Module.parse("module {\n" + "\n".join(texts) + "\n}")


def split(function: Function, target: Any, tf32: bool = False) -> bool:
    """Rewrites every sce whose logits come from a contraction and are too large to stay in cache.

    `tf32`: contractions of float32 may run in TF32, which has tiles of its own.
    """
    _narrow_storage(function)
    ops: list[Op] = []
    replaced: dict[Value, Value] = {}
    for op in function.ops:
        op.operands = [replaced.get(value, value) for value in op.operands]
        root = _contraction(op.operands[0]) if op.name == "sce" else None
        reason = _refusal(op, root, target, tf32) if op.name == "sce" else ""
        if reason is not None:
            if op.name == "sce":
                decisions.current().add("refused", op, "its logits' contraction", reason)
            ops.append(op)
            continue
        assert root is not None
        new = _split(op, _tile(root, op, target, tf32), set(function.outputs))
        decisions.current().add("fused", op, root.name, f"partials over tiles of {new[0].attrs['tile']} columns")
        ops += new
        replaced.update(zip(op.results, new[-1].results, strict=True))
    if not replaced:
        return False
    function.ops = ops
    function.outputs = [replaced.get(value, value) for value in function.outputs]
    function.link()
    return True


def _narrow_storage(function: Function) -> None:
    """Logits that were widened for the loss (autocast) are kept as the contraction made them, and widened again."""
    heads = [op for op in function.ops if op.name == "sce" and _contraction(op.operands[0]) is not None]
    again: dict[Op, list[Op]] = {}  # user -> casts to put in front of it
    for op in heads:
        logits = op.operands[0]
        cast = logits.op
        if cast is None or cast.name != "cast" or cast.operands[0].bytes >= logits.bytes or logits in function.outputs:
            continue
        for user in [u for u in logits.users if u is not op]:
            clone = records.make("cast", cast.operands, logits.shape, logits.dtype, user)
            clone.attrs = dict(cast.attrs)
            user.operands = [clone.results[0] if value is logits else value for value in user.operands]
            again.setdefault(user, []).append(clone)
    if again:
        function.ops = [item for op in function.ops for item in (*again.get(op, ()), op)]
        function.link()


def _contraction(value: Value) -> Op | None:
    """The contraction whose epilogue computes the logits, if there is one."""
    for _ in range(6):
        op = value.op
        if op is None:
            return None
        if op.name in CONTRACTIONS:
            return op
        if op.name not in _EPILOGUE:
            return None
        value = op.operands[0]
    return None


def _refusal(op: Op, root: Op | None, target: Any, tf32: bool) -> str | None:
    """Why the head stays whole; None if it is split."""
    logits = op.operands[0]
    if root is None or root.name not in ("matmul", "linear"):
        return "the logits do not come from a contraction"
    if root.results[0].shape[-1] != logits.shape[1]:
        return "the classes are not the contraction's columns"
    if op.attrs["label_smoothing"]:
        return "label smoothing needs the sum of the logits"
    cache = getattr(target, "l3", None) or target.l2
    if logits.bytes <= cache:
        return f"the logits ({logits.bytes >> 10} KiB) fit the last-level cache"
    if _tile(root, op, target, tf32) >= logits.shape[1]:
        return "one block of the contraction holds a whole row"
    return None


def _tile(root: Op, op: Op, target: Any, tf32: bool) -> int:
    """The columns that the configurator gives a block of the contraction."""
    a, b = root.operands[:2]
    n, k = root.results[0].shape[-1], a.shape[-1]
    transposed = root.name == "linear" or (b.op is not None and b.op.name == "transpose")
    rhs = Operand(b.dtype, k if transposed else 1, 1 if transposed else n)
    rows = op.operands[0].shape[0]
    compute = "tf32" if tf32 and a.dtype == b.dtype == "f32" else ""
    accumulate = "f64" if a.dtype == "f64" else "f32"
    problem = ContractionProblem(rows, n, k, 1, Operand(a.dtype, k, 1), rhs, accumulate, compute)
    schedule = schedule_contraction(problem, target)
    tile = min(MAX_TILE, max(UNIT, int(schedule.workgroup[1])))
    return tile // UNIT * UNIT


def _split(op: Op, tile: int, outputs: set[Value]) -> list[Op]:
    logits, target, *weight = op.operands
    wide = op.results[1].dtype
    shape = (logits.shape[0], -(-logits.shape[1] // tile))
    stored = logits in outputs or any(user is not op for user in _users(logits))
    partials = Op("sce_partials", [logits] if stored else [logits, target], {"tile": tile}, op.location, op.order)
    for _ in range(2 if stored else 3):
        partials.result(shape, wide)
    attrs = {key: op.attrs[key] for key in ("has_weight", "ignore_index", "reduction")} | {"classes": logits.shape[1]}
    picked = logits if stored else partials.results[2]
    merge = Op("sce_merge", [*partials.results[:2], picked, target, *weight], attrs, op.location, op.order)
    for result in op.results:
        merge.result(result.shape, result.dtype)
    return [partials, merge]


def _users(value: Value) -> list[Op]:
    users = list(value.users)
    for user in users:
        if user.name in VIEWS:
            users += user.results[0].users
    return [user for user in users if user.name not in VIEWS]
