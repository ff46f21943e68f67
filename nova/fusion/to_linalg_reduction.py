"""nova-to-linalg: reductions, and the row-wise ops that expand into reductions and elementwise ops.

Softmax and cross entropy subtract the row maximum before exponentiating; layer and batch norm compute the mean first
and then the centred variance. bf16 and f16 accumulate in f32 and round once, at the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nova.fusion import scalars
from nova.fusion.kernel import Expr, Out, binary, compare, const, convert_float, expr, load, select
from nova.fusion.lowering import Lowering, lowers
from nova.fusion.records import Op, Value
from nova.fusion.scalars import add, div, exp, log, mul, sqrt, sub
from nova.fusion.space import Dims, Instance

_LOW = {"f32": float("-inf"), "f64": float("-inf"), "i64": -(1 << 63), "i32": -(1 << 31), "i16": -(1 << 15), "i8": -128}
_HIGH = {
    "f32": float("inf"),
    "f64": float("inf"),
    "i64": (1 << 63) - 1,
    "i32": (1 << 31) - 1,
    "i16": (1 << 15) - 1,
    "i8": 127,
}


def _combiner(op: str, type_: str, unsigned: bool) -> tuple[str, float | int]:
    """The combining op and its neutral element."""
    floating = type_ in ("f32", "f64")
    if op == "sum":
        return ("arith.addf", 0.0) if floating else ("arith.addi", 0)
    if op == "prod":
        return ("arith.mulf", 1.0) if floating else ("arith.muli", 1)
    if op in ("any", "all") or type_ == "i1":
        return ("arith.ori", 0) if op in ("any", "max") else ("arith.andi", 1)
    if op == "max":
        if unsigned:
            return "arith.maxui", 0
        return "arith.maximumf" if floating else "arith.maxsi", _LOW[type_]
    if unsigned:
        return "arith.minui", 255 - 256  # all bits set, as a signed byte
    return "arith.minimumf" if floating else "arith.minsi", _HIGH[type_]


def fold(low: Lowering, over: Dims, axes: Sequence[int], element: Expr, op: str, unsigned: bool = False) -> Expr:
    """A reduction of `element`, walked as `over`, over its `axes`; in the element's type."""
    combine, init = _combiner(op, element.type, unsigned)
    reduced = low.loop_numbers(low.leaves(over[axis] for axis in axes))
    return low.reduce(low.loops_of(over), reduced, element, combine, init)


def _rounded(low: Lowering, value: Value, element: Expr) -> None:
    """Writes a result, rounded to its type."""
    target = scalars.element_type(value.dtype)
    low.write(value, convert_float(element, target) if element.type != target else element)


@lowers("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_any", "reduce_all")
def _reduce(low: Lowering, op: Op, operands: list[Instance]) -> None:
    x = op.operands[0]
    element = low.wide(x, operands[0])
    _rounded(low, op.results[0], fold(low, operands[0].dims, op.attrs["dims"], element, op.name[7:], x.dtype == "u8"))


@lowers("argmax", "argmin")
def _argmax(low: Lowering, op: Op, operands: list[Instance]) -> None:
    """The least index at which the extreme value stands; NaN is extreme."""
    x, dims, axis = op.operands[0], operands[0].dims, op.attrs["dim"]
    element = low.wide(x, operands[0])
    extreme = fold(low, dims, [axis], element, op.name[3:], x.dtype == "u8")
    if element.type in ("f32", "f64"):
        hit = binary("arith.ori", compare("oeq", element, extreme), scalars.isnan(element))
    else:
        hit = compare("eq", element, extreme)
    index = expr("arith.index_cast", (low.position(dims[axis]),), "i64")
    first = fold(low, dims, [axis], select(hit, index, const(_HIGH["i64"], "i64")), "min")
    low.write(op.results[0], first)


# --- softmax ---------------------------------------------------------------------------------------------------------


@lowers("softmax", "log_softmax")
def _softmax(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims, axes = operands[0].dims, [op.attrs["dim"]]
    x = low.wide(op.operands[0], operands[0])
    shifted = sub(x, fold(low, dims, axes, x, "max"))
    if op.name == "softmax":
        loops = low.loops_of(dims)
        power = low.scratch(loops, exp(shifted))
        _rounded(low, op.results[0], div(power, fold(low, dims, axes, power, "sum")))
    else:
        total = fold(low, dims, axes, exp(shifted), "sum")
        log_total = low.scratch(low.loops_of([d for a, d in enumerate(dims) if a not in axes]), log(total))
        _rounded(low, op.results[0], sub(shifted, log_total))


@lowers("softmax_backward", "log_softmax_backward")
def _softmax_backward(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims, axes = operands[0].dims, [op.attrs["dim"]]
    dy, y = (low.wide(value, instance) for value, instance in zip(op.operands, operands, strict=True))
    if op.name == "softmax_backward":
        _rounded(low, op.results[0], mul(sub(dy, fold(low, dims, axes, mul(dy, y), "sum")), y))
    else:
        _rounded(low, op.results[0], sub(dy, mul(exp(y), fold(low, dims, axes, dy, "sum"))))


# --- layer and batch norm --------------------------------------------------------------------------------------------


def _mean(low: Lowering, dims: Dims, axes: Sequence[int], x: Expr) -> Expr:
    """Of x over `axes`."""
    return mul(fold(low, dims, axes, x, "sum"), _share(low, dims, axes, x.type))


def _share(low: Lowering, dims: Dims, axes: Sequence[int], type_: str) -> Expr:
    """One over the number of elements along `axes`, by which eager multiplies too: a division costs many times that."""
    count = low.count(low.leaves(dims[axis] for axis in axes))
    return const(1 / count if count else math.inf, type_)


def _statistics(low: Lowering, op: Op, x: Expr, dims: Dims, axes: Sequence[int]) -> tuple[Expr, Expr, Expr]:
    """Mean, biased variance and 1/sqrt(var + eps) of x over `axes`."""
    kept = low.loops_of([atoms for axis, atoms in enumerate(dims) if axis not in axes])
    mean = low.scratch(kept, _mean(low, dims, axes, x))
    centred = sub(x, mean)
    variance = low.scratch(kept, _mean(low, dims, axes, mul(centred, centred)))
    rstd = low.scratch(kept, div(const(1, x.type), sqrt(add(variance, const(op.attrs["eps"], x.type)))))
    return mean, variance, rstd


def _affine(low: Lowering, op: Op, operands: list[Instance], value: Expr) -> Expr:
    """value * weight + bias, for the parameters that are there."""
    parameters = [convert_float(low.read(v, i), value.type) for v, i in zip(op.operands[1:], operands[1:], strict=True)]
    if parameters:
        value = mul(value, parameters[0])
    return add(value, parameters[1]) if len(parameters) > 1 else value


@lowers("layer_norm")
def _layer_norm(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims = operands[0].dims
    axes = range(len(dims) - op.attrs["axes"], len(dims))
    x = low.wide(op.operands[0], operands[0])
    mean, _, rstd = _statistics(low, op, x, dims, axes)
    _rounded(low, op.results[1], mean)
    _rounded(low, op.results[2], rstd)
    _rounded(low, op.results[0], _affine(low, op, operands, mul(sub(x, mean), rstd)))


@lowers("layer_norm_backward")
def _layer_norm_backward(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims, trailing = operands[0].dims, op.attrs["axes"]
    leading = list(range(len(dims) - trailing))
    axes = range(len(dims) - trailing, len(dims))
    dy, x = (low.wide(op.operands[i], operands[i]) for i in (0, 1))
    mean, rstd = (convert_float(low.read(op.operands[i], operands[i]), x.type) for i in (2, 3))
    centred, scaled = sub(x, mean), dy
    if len(op.operands) > 4:
        scaled = mul(dy, convert_float(low.read(op.operands[4], operands[4]), x.type))
        _rounded(low, op.results[1], fold(low, dims, leading, mul(dy, mul(centred, rstd)), "sum"))
        _rounded(low, op.results[2], fold(low, dims, leading, dy, "sum"))
    # rstd is one number a row, so it stays out of the sums: they wait for the mean only, and dx is two multiply-adds
    rows = low.loops_of([dims[axis] for axis in leading])
    first, second = _mean(low, dims, axes, scaled), _mean(low, dims, axes, mul(scaled, centred))
    first = low.scratch(rows, mul(first, rstd))
    second = low.scratch(rows, mul(mul(second, rstd), mul(rstd, rstd)))  # (rstd^3 itself may leave float32)
    _rounded(low, op.results[0], sub(mul(scaled, rstd), add(mul(centred, second), first)))


@lowers("batch_norm")
def _batch_norm(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims = operands[0].dims
    axes = [axis for axis in range(len(dims)) if axis != 1]
    x = low.wide(op.operands[0], operands[0])
    mean, variance, rstd = _statistics(low, op, x, dims, axes)
    for value, element in zip(op.results[1:], (mean, variance, rstd), strict=True):
        _rounded(low, value, element)
    _rounded(low, op.results[0], _affine(low, op, operands, mul(sub(x, mean), rstd)))


@lowers("batch_norm_backward")
def _batch_norm_backward(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims = operands[0].dims
    axes = [axis for axis in range(len(dims)) if axis != 1]
    dy, x = (low.wide(op.operands[i], operands[i]) for i in (0, 1))
    mean, rstd = (convert_float(low.read(op.operands[i], operands[i]), x.type) for i in (2, 3))
    normal = mul(sub(x, mean), rstd)
    share = _share(low, dims, axes, x.type)
    dbias = fold(low, dims, axes, dy, "sum")
    dweight = fold(low, dims, axes, mul(dy, normal), "sum")
    _rounded(low, op.results[1], dweight)
    _rounded(low, op.results[2], dbias)
    channel = low.loops_of(dims[1:2])
    scale = rstd
    if len(op.operands) > 4:
        scale = mul(rstd, convert_float(low.read(op.operands[4], operands[4]), x.type))
    scale = low.scratch(channel, scale)
    first, second = low.scratch(channel, mul(dbias, share)), low.scratch(channel, mul(dweight, share))
    _rounded(low, op.results[0], mul(scale, sub(sub(dy, first), mul(normal, second))))


# --- cross entropy ---------------------------------------------------------------------------------------------------


class _Labels:
    """The label of each row: whether it counts, and a class number that is safe to index with."""

    def __init__(self, low: Lowering, op: Op, operands: list[Instance], position: int, classes: int):
        self.classes = classes
        target, instance = op.operands[position], operands[position]
        rows = low.loops_of(instance.dims)
        label = low.read(target, instance)
        counts = compare("ne", label, const(op.attrs["ignore_index"], "i64"))
        outside = compare("uge", label, const(self.classes, "i64"))
        check = expr("nova.check", (binary("arith.andi", outside, counts), label), "check")
        clamped = binary(
            "arith.minsi", binary("arith.maxsi", label, const(0, "i64")), const(max(0, self.classes - 1), "i64")
        )
        tensor, index = low.local(rows, "i64")
        low.emit(rows, [Out(tensor, index, clamped)], checks=[check])
        self.safe = load(tensor, index)
        self.counts = counts
        self.column = expr("arith.index_cast", (self.safe,), "index")


def _row(low: Lowering, dims: Dims) -> list[int]:
    return low.loops_of(dims[:1])


def _extract(low: Lowering, value: Value, indices: Sequence[Expr]) -> Expr | None:
    """An element of an argument as a whole tensor; None if the value is no plain argument."""
    tensor = low.tensors.get(value)
    return expr("tensor.extract", indices, tensor.dtype, tensor) if tensor is not None else None


def _weight(low: Lowering, op: Op, operands: list[Instance], labels: _Labels, type_: str) -> tuple[Expr, Expr] | None:
    """(weight of each class, weight of the row's label), or None."""
    if not op.attrs["has_weight"]:
        return None
    value, instance = op.operands[-1], operands[-1]
    every = convert_float(low.read(value, instance), type_)
    taken = _extract(low, value, [labels.column])
    if taken is None:
        raise AssertionError("class weights are not an argument of the kernel")
    return every, convert_float(taken, type_)


def _finish(
    low: Lowering,
    op: Op,
    operands: list[Instance],
    rows: list[int],
    lse: Expr,
    picked: Expr,
    labels: _Labels,
    spread: Expr | None = None,
) -> None:
    """Per-row losses from lse and the target's logit, and their sum or mean."""
    type_ = lse.type
    loss = sub(lse, picked)
    weights = _weight(low, op, operands, labels, type_)
    if weights:
        loss = mul(loss, weights[1])
    terms = [loss]
    if spread is not None:
        smoothing = op.attrs["label_smoothing"]
        terms = [mul(loss, const(1 - smoothing, type_)), mul(spread, const(smoothing / max(1, labels.classes), type_))]
        if not weights or op.attrs["reduction"] != 1:
            terms = [add(*terms)]
    terms = [select(labels.counts, term, const(0, type_)) for term in terms]
    if op.attrs["reduction"] == 0:
        _rounded(low, op.results[0], terms[0])
        return
    totals = [low.reduce(rows, rows, low.scratch(rows, term), "arith.addf", 0.0) for term in terms]
    if op.attrs["reduction"] == 1:
        share = select(labels.counts, weights[1] if weights else const(1, type_), const(0, type_))
        count = low.reduce(rows, rows, low.scratch(rows, share), "arith.addf", 0.0)
        totals = [div(total, count) for total in totals]  # each: labels of no weight give 0/0 + x/0 = NaN, as in eager
    total = totals[0] if len(totals) == 1 else add(*totals)
    _rounded(low, op.results[0], total)


@lowers("sce")
def _sce(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims = operands[0].dims
    rows = _row(low, dims)
    x = low.wide(op.operands[0], operands[0])
    labels = _Labels(low, op, operands, 1, op.operands[0].shape[1])
    top = fold(low, dims, [1], x, "max")
    # a row of nothing but -inf: eager gives nan there, and so does (-inf) - (-inf)
    lse = low.scratch(rows, add(log(fold(low, dims, [1], exp(sub(x, top)), "sum")), top))
    _rounded(low, op.results[1], lse)
    picked = _extract(low, op.operands[0], [low.position(dims[0]), labels.column])
    if picked is None:  # computed in this kernel: select the label's column while summing
        here = compare("eq", expr("arith.index_cast", (low.position(dims[1]),), "i64"), labels.safe)
        picked = fold(low, dims, [1], select(here, x, const(0, x.type)), "sum")
    spread = None
    if op.attrs["label_smoothing"]:
        spread = sub(lse, x)
        if op.attrs["has_weight"]:
            spread = mul(spread, convert_float(low.read(op.operands[2], operands[2]), x.type))
        spread = fold(low, dims, [1], spread, "sum")
    _finish(low, op, operands, rows, lse, convert_float(picked, x.type), labels, spread)


@lowers("sce_partials")
def _sce_partials(low: Lowering, op: Op, operands: list[Instance]) -> None:
    """Reductions over tiles of the classes, in the contraction's epilogue."""
    dims = operands[0].dims
    (classes,) = low.loops_of(dims[1:])
    x = low.wide(op.operands[0], operands[0])
    loops = low.loops_of(dims)
    (tile,) = low.loops_of(low.space.outputs[op.results[0]].dims[1:])
    kernel = low.kernel
    kernel.tiles[tile] = (classes, op.attrs["tile"])

    def partial(element: Expr, combine: str, init: float, value: Value) -> Expr:
        tensor, index = low.place(value)
        low.emit(loops, [Out(tensor, index, element, combine, init)], [classes])
        return load(tensor, index)

    top = partial(x, "arith.maximumf", float("-inf"), op.results[0])
    shift = select(compare("oeq", top, const(float("-inf"), x.type)), const(0, x.type), top)
    partial(exp(sub(x, shift)), "arith.addf", 0.0, op.results[1])
    if len(op.operands) > 1:
        target = low.read(op.operands[1], operands[1])
        here = compare("eq", expr("arith.index_cast", (low.position(dims[1]),), "i64"), target)
        partial(select(here, x, const(0, x.type)), "arith.addf", 0.0, op.results[2])


@lowers("sce_merge")
def _sce_merge(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims = operands[0].dims
    rows = _row(low, dims)
    maxima, sums = (low.read(op.operands[i], operands[i]) for i in (0, 1))
    labels = _Labels(low, op, operands, 3, op.attrs["classes"])
    top = fold(low, dims, [1], maxima, "max")
    total = fold(low, dims, [1], mul(sums, exp(sub(maxima, top))), "sum")
    lse = low.scratch(rows, add(log(total), top))
    _rounded(low, op.results[1], lse)
    if op.operands[2].shape[1] == op.attrs["classes"]:
        from nova.fusion.to_linalg_movement import extract

        picked = extract(low, op.operands[2], [low.position(dims[0]), labels.column])
    else:
        picked = fold(low, dims, [1], low.read(op.operands[2], operands[2]), "sum")
    _finish(low, op, operands, rows, lse, convert_float(picked, lse.type), labels)


@lowers("sce_backward")
def _sce_backward(low: Lowering, op: Op, operands: list[Instance]) -> None:
    dims = operands[1].dims
    x = low.wide(op.operands[1], operands[1])
    lse = convert_float(low.read(op.operands[3], operands[3]), x.type)
    labels = _Labels(low, op, operands, 2, op.operands[1].shape[1])
    probability = exp(sub(x, lse))
    here = compare("eq", expr("arith.index_cast", (low.position(dims[1]),), "i64"), labels.safe)
    weights = _weight(low, op, operands, labels, x.type)
    smoothing = op.attrs["label_smoothing"]
    scale = convert_float(low.wide(op.operands[0], operands[0]), x.type)
    one, zero = const(1, x.type), const(0, x.type)
    at_label = scale if weights is None else mul(scale, weights[1])
    if smoothing:
        at_label = mul(at_label, const(1 - smoothing, x.type))
    at_label = low.scratch(_row(low, dims), select(labels.counts, at_label, zero))
    gradient = mul(at_label, sub(probability, select(here, one, zero)))
    if smoothing:
        share = const(smoothing / max(1, labels.classes), x.type)
        if weights:
            total = fold(low, dims, [1], weights[0], "sum")
            spread = sub(mul(probability, total), weights[0])
        else:
            spread = sub(mul(probability, const(labels.classes, x.type)), one)
        per_row = low.scratch(_row(low, dims), select(labels.counts, mul(scale, share), zero))
        gradient = add(gradient, mul(per_row, spread))
    _rounded(low, op.results[0], select(labels.counts, gradient, zero))
