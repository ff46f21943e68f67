"""Rewrites before grouping: ops that need several kernels become the ops of those kernels.

sce_backward {reduction = mean}  ->  n = sum of the labels' weights;  sce_backward {reduction = sum} (dloss / n)
convolution {padding}            ->  pad; convolution without padding
convolution_backward_data        ->  spread and pad dy; convolution with the flipped weight, channels swapped
pad with negative amounts        ->  slice; pad
take x (0, 1, 2, ..)              ->  slice: learned positions; its backward pads
slice (slice_scatter x u)        ->  u, or slice x: what in-place ops on views leave behind
slice (mul a b)                  ->  mul (slice a) (slice b), where only slices of disjoint parts read the product
"""

from __future__ import annotations

from collections.abc import Callable

from nova.dialect.types import FLOATS, Shape, tensor_type
from nova.fusion.records import Function, Op, Value, make
from nova.mlir import ir

Rewrite = Callable[["Builder", Op], "list[Value] | None"]


class Builder:
    """Collects the ops that replace one."""

    def __init__(self, like: Op):
        self.like = like
        self.ops: list[Op] = []

    def emit(self, name: str, operands: list[Value], shape: Shape, dtype: str, **attrs: object) -> Value:
        op = make(name, operands, shape, dtype, self.like, **attrs)
        self.ops.append(op)
        return op.results[0]

    def constant(self, number: float, shape: Shape, dtype: str) -> Value:
        type_ = tensor_type(shape, dtype)
        element = ir.RankedTensorType(type_).element_type
        scalar = (
            ir.FloatAttr.get(element, float(number)) if dtype in FLOATS else ir.IntegerAttr.get(element, int(number))
        )
        return self.emit("constant", [], shape, dtype, value=ir.DenseElementsAttr.get_splat(type_, scalar))

    def transpose(self, x: Value, permutation: tuple[int, ...]) -> Value:
        return self.emit("transpose", [x], tuple(x.shape[a] for a in permutation), x.dtype, permutation=permutation)

    def reshape(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == shape else self.emit("reshape", [x], shape, x.dtype)

    def pad(self, x: Value, low: tuple[int, ...], high: tuple[int, ...], value: float = 0.0) -> Value:
        if not any(low) and not any(high):
            return x
        shape = tuple(n + a + b for n, a, b in zip(x.shape, low, high, strict=True))
        return self.emit("pad", [x], shape, x.dtype, low=low, high=high, value=value)

    def crop(self, x: Value, low: tuple[int, ...], high: tuple[int, ...]) -> Value:
        limits = tuple(n - b for n, b in zip(x.shape, high, strict=True))
        shape = tuple(b - a for a, b in zip(low, limits, strict=True))
        if shape == x.shape:
            return x
        return self.emit("slice", [x], shape, x.dtype, starts=low, limits=limits, strides=(1,) * len(shape))


def expand(function: Function) -> None:
    """Applies the rewrites to every op of `function`, in place."""
    forward_slices(function)
    push_slices(function)
    ops: list[Op] = []
    replaced: dict[Value, Value] = {}
    for op in function.ops:
        if replaced:
            op.operands = [replaced.get(value, value) for value in op.operands]
        rewrite = REWRITES.get(op.name)
        builder = Builder(op)
        results = rewrite(builder, op) if rewrite else None
        if results is None:
            ops.append(op)
            continue
        ops += builder.ops
        replaced.update(zip(op.results, results, strict=True))
    if replaced:
        function.outputs = [replaced.get(value, value) for value in function.outputs]
    function.ops = ops
    function.link()


def forward_slices(function: Function) -> None:
    """Reads a slice of an updated tensor from the update, or from what was updated, where it lies in one of them."""
    replaced: dict[Value, Value] = {}
    for op in function.ops:
        if replaced:
            op.operands = [replaced.get(value, value) for value in op.operands]
        if op.name != "slice" or any(step != 1 for step in op.attrs["strides"]):
            continue
        source = op.operands[0]
        while source.op is not None and source.op.name == "slice_scatter":
            scatter = source.op
            if any(step != 1 for step in scatter.attrs["strides"]):
                break
            starts, limits = scatter.attrs["starts"], scatter.attrs["limits"]
            if starts == op.attrs["starts"] and limits == op.attrs["limits"]:
                replaced[op.results[0]] = scatter.operands[1]
                break
            mine = zip(op.attrs["starts"], op.attrs["limits"], strict=True)
            if all(a < d and c < b for (a, b), (c, d) in zip(mine, zip(starts, limits, strict=True), strict=True)):
                break  # they overlap
            source = op.operands[0] = scatter.operands[0]
    if replaced:
        function.outputs = [replaced.get(value, value) for value in function.outputs]
    drop_unread(function)
    function.link()


def drop_unread(function: Function) -> None:
    """Removes scatters and slices that nobody reads any more."""
    needed = set(function.outputs)
    kept: list[Op] = []
    for op in reversed(function.ops):
        if op.name not in ("slice_scatter", "slice") or op.results[0] in needed:
            needed.update(op.operands)
            kept.append(op)
    function.ops = kept[::-1]


def push_slices(function: Function) -> None:
    """Computes parts of an elementwise value where they are used, if no part is used twice: a slice of a value that is
    computed cannot be folded into a kernel's access, a slice of one in memory can."""
    outputs = set(function.outputs)
    ops: list[Op] = []
    for op in reversed(function.ops):
        if op.name in _PUSHED and op.results[0] not in outputs and _sliced_apart(op):
            for user in op.results[0].users:
                ops += _sliced_copy(op, user)[::-1]
            for user in op.results[0].users:
                ops.remove(user)
        else:
            ops.append(op)
    function.ops = ops[::-1]
    function.link()


_PUSHED = frozenset({"add", "sub", "mul", "neg", "cast", "div", "where"})


def _sliced_apart(op: Op) -> bool:
    """Whether only slices read the result, and together they read no more than it has."""
    value = op.results[0]
    total = 0
    for user in value.users:
        if user.name != "slice" or any(step != 1 for step in user.attrs["strides"]):
            return False
        total += user.results[0].bytes
    return bool(value.users) and total <= value.bytes


def _sliced_copy(op: Op, part: Op) -> list[Op]:
    """The ops that compute one slice of `op`; the last one makes the slice's own value."""
    value = op.results[0]
    b = Builder(part)
    operands = []
    for operand in op.operands:
        shift = len(value.shape) - len(operand.shape)
        low = tuple(0 if n == 1 else part.attrs["starts"][shift + axis] for axis, n in enumerate(operand.shape))
        high = tuple(0 if n == 1 else n - part.attrs["limits"][shift + axis] for axis, n in enumerate(operand.shape))
        operands.append(b.crop(operand, low, high))
    copy = Op(op.name, operands, op.attrs, op.location, op.order)
    copy.results = part.results  # the slice's readers read the copy
    for result in copy.results:
        result.op = copy
    for made in b.ops:
        made.results[0].users.append(copy)
        made.operands[0].users.append(made)
    for operand in operands:
        if copy not in operand.users:
            operand.users.append(copy)
    for operand in op.operands:
        if op in operand.users:
            operand.users.remove(op)
    return [*b.ops, copy]


def _sce_backward(b: Builder, op: Op) -> list[Value] | None:
    if op.attrs["reduction"] != 1:
        return None
    dloss, logits, target, lse, *weight = op.operands
    rows, classes = logits.shape
    dtype = lse.dtype
    ignored = b.constant(op.attrs["ignore_index"], (), "i64")
    counts = b.emit("ne", [target, ignored], (rows,), "bool")
    share = b.emit("cast", [counts], (rows,), dtype)
    if weight:
        zero, last = b.constant(0, (), "i64"), b.constant(classes - 1, (), "i64")
        label = b.emit("clamp", [target, zero, last], (rows,), "i64")
        taken = b.emit("take", [weight[0], label], (rows,), weight[0].dtype)
        taken = taken if weight[0].dtype == dtype else b.emit("cast", [taken], (rows,), dtype)
        share = b.emit("mul", [share, taken], (rows,), dtype)
    total = b.emit("reduce_sum", [share], (), dtype, dims=(0,), keepdim=False)
    wide = dloss if dloss.dtype == dtype else b.emit("cast", [dloss], (), dtype)
    mean = b.emit("div", [wide, total], (), dtype)
    # the scaled gradient keeps the wide type: the verifier of sce_backward wants logits' type, so low precision rounds
    scaled = mean if dtype == dloss.dtype else b.emit("cast", [mean], (), dloss.dtype)
    attrs = op.attrs | {"reduction": 2}
    return [b.emit("sce_backward", [scaled, logits, target, lse, *weight], logits.shape, logits.dtype, **attrs)]


def _pad(b: Builder, op: Op) -> list[Value] | None:
    low, high = op.attrs["low"], op.attrs["high"]
    if min((*low, *high), default=0) >= 0:
        return None
    x = b.crop(op.operands[0], tuple(max(0, -n) for n in low), tuple(max(0, -n) for n in high))
    return [b.pad(x, tuple(max(0, n) for n in low), tuple(max(0, n) for n in high), op.attrs["value"])]


# --- convolutions ---------------------------------------------------------------------------------------------------


def _plain(op: Op, **changes: object) -> dict[str, object]:
    """Attributes of a convolution without padding and transposition."""
    spatial = len(op.attrs["stride"])
    zeros = (0,) * spatial
    return op.attrs | {"padding": zeros, "transposed": False, "output_padding": zeros} | changes


def _around(spatial: tuple[int, ...]) -> tuple[int, ...]:
    return (0, 0, *spatial)


def _forward(b: Builder, op: Op, x: Value, weight: Value, out: Value) -> Value:
    padding = _around(op.attrs["padding"])
    return b.emit("convolution", [b.pad(x, padding, padding), weight], out.shape, out.dtype, **_plain(op))


def _data_gradient(b: Builder, op: Op, dy: Value, weight: Value, dx: Value) -> Value:
    """dx[n,c,p] = sum over o, k of dy[n,o,(p + padding - k*dilation) / stride] * weight[o,c,k].

    This is a convolution of the spread dy with the weight flipped in space and its channels swapped, within each group.
    """
    stride, padding, dilation = op.attrs["stride"], op.attrs["padding"], op.attrs["dilation"]
    groups = op.attrs["groups"]
    spatial = len(stride)
    if any(step != 1 for step in stride):
        spread = (*dy.shape[:2], *((n - 1) * s + 1 for n, s in zip(dy.shape[2:], stride, strict=True)))
        zeros = b.constant(0, spread, dy.dtype)
        attrs = {"starts": (0,) * (spatial + 2), "limits": spread, "strides": (1, 1, *stride)}
        dy = b.emit("slice_scatter", [zeros, dy], spread, dy.dtype, **attrs)
    low, high = [], []
    for axis in range(spatial):
        reach = dilation[axis] * (weight.shape[2 + axis] - 1)
        low.append(reach - padding[axis])
        high.append(dx.shape[2 + axis] + reach - low[-1] - dy.shape[2 + axis])
    crop_low, crop_high = (tuple(max(0, -n) for n in part) for part in (low, high))
    pad_low, pad_high = (tuple(max(0, n) for n in part) for part in (low, high))
    dy = b.pad(b.crop(dy, _around(crop_low), _around(crop_high)), _around(pad_low), _around(pad_high))
    if any(n != 1 for n in weight.shape[2:]):
        weight = b.emit("reverse", [weight], weight.shape, weight.dtype, dims=tuple(range(2, 2 + spatial)))
    outer, inner, *kernel = weight.shape
    weight = b.reshape(weight, (groups, outer // groups, inner, *kernel))
    weight = b.transpose(weight, (0, 2, 1, *range(3, 3 + spatial)))
    weight = b.reshape(weight, (groups * inner, outer // groups, *kernel))
    return b.emit("convolution", [dy, weight], dx.shape, dx.dtype, **_plain(op, stride=(1,) * spatial))


def _convolution(b: Builder, op: Op) -> list[Value] | None:
    x, weight = op.operands
    if op.attrs["transposed"]:
        return [_data_gradient(b, op, x, weight, op.results[0])]
    return [_forward(b, op, x, weight, op.results[0])] if any(op.attrs["padding"]) else None


def _convolution_backward_data(b: Builder, op: Op) -> list[Value] | None:
    dy, weight = op.operands
    gradient = _forward if op.attrs["transposed"] else _data_gradient
    return [gradient(b, op, dy, weight, op.results[0])]


def _convolution_backward_weight(b: Builder, op: Op) -> list[Value] | None:
    dy, x = op.operands
    if not op.attrs["transposed"] and not any(op.attrs["padding"]):
        return None
    if op.attrs["transposed"]:
        dy, x = x, dy
    padding = _around(op.attrs["padding"])
    dw = op.results[0]
    return [b.emit("convolution_backward_weight", [dy, b.pad(x, padding, padding)], dw.shape, dw.dtype, **_plain(op))]


def _counts_up(ids: Value) -> bool:
    """Whether index i is i: positions 0, 1, 2, .. of a sequence."""
    return ids.op is not None and ids.op.name == "iota" and len(ids.shape) == 1


def _take(b: Builder, op: Op) -> list[Value] | None:
    table, ids = op.operands
    if not _counts_up(ids) or ids.shape[0] > table.shape[0]:
        return None
    high = (table.shape[0] - ids.shape[0], *(0 for _ in table.shape[1:]))
    return [b.crop(table, (0,) * len(table.shape), high)]


def _take_backward(b: Builder, op: Op) -> list[Value] | None:
    dy, ids = op.operands
    rows = op.attrs["rows"]
    if not _counts_up(ids) or ids.shape[0] > rows or op.attrs["padding_idx"] >= 0:
        return None
    high = (rows - ids.shape[0], *(0 for _ in dy.shape[1:]))
    return [b.pad(dy, (0,) * len(dy.shape), high)]


REWRITES: dict[str, Rewrite] = {
    "take": _take,
    "take_backward": _take_backward,
    "sce_backward": _sce_backward,
    "pad": _pad,
    "convolution": _convolution,
    "convolution_backward_data": _convolution_backward_data,
    "convolution_backward_weight": _convolution_backward_weight,
}
