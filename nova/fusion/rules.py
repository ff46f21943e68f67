"""One rule an op: how its dimensions line up with the loops of a group (see `space`).

A rule gets the space, the op and its operands' instances; it joins atoms, records reductions, and returns the
dimensions of each result. Ops without a rule are kernels of their own (scatter, scan, optimizers) or run through
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nova.dialect.elementwise import ELEMENTWISE_OPS
from nova.fusion.records import Op, Value
from nova.fusion.space import VIEWS, Atom, Dims, Instance, Mismatch, Space, is_generator

Rule = Callable[[Space, Op, list[Instance]], list[Dims]]
RULES: dict[str, Rule] = {}

REDUCTIONS = frozenset({
    "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_any", "reduce_all", "argmax", "argmin",
})  # fmt: skip
NORMALISATIONS = frozenset({
    "softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "layer_norm", "layer_norm_backward",
    "batch_norm", "batch_norm_backward", "sce", "sce_backward", "sce_merge",
})  # fmt: skip
GATHERS = frozenset({"take", "gather", "index", "reverse"})
RANDOM = frozenset({"uniform", "normal", "randint"})
PIECEWISE = frozenset({"concat", "pad", "slice_scatter"})
POOLS = frozenset({"max_pool2d"})
CONTRACTIONS = frozenset({
    "matmul", "linear", "convolution", "convolution_backward_data", "convolution_backward_weight",
})  # fmt: skip
ELEMENTWISE = ELEMENTWISE_OPS | RANDOM


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def fresh(shape: Sequence[int]) -> Dims:
    """Loops of their own for every dimension of `shape`."""
    return [[Atom(n)] if n != 1 else [] for n in shape]


def broadcast(space: Space, op: Op, operands: list[Instance], shape: Sequence[int]) -> Dims:
    """Joins the operands' dimensions as NumPy broadcasting aligns them; the result's dimensions."""
    rank = len(shape)
    result: Dims = [[] for _ in range(rank)]
    for instance in operands:
        for axis, atoms in enumerate(instance.dims, rank - len(instance.dims)):
            if not atoms:
                continue
            if result[axis]:
                space.unify(result[axis], atoms)
            else:
                result[axis] = atoms
    return result


@rule(*sorted(ELEMENTWISE_OPS))
def _elementwise(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    return [broadcast(space, op, operands, op.results[0].shape)]


@rule(*sorted(RANDOM))
def _random(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    return [fresh(op.results[0].shape)]


@rule("copy")
def _copy(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    return [operands[0].dims]


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_any", "reduce_all")
def _reduce(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    return [_reduced(space, op, operands[0].dims, op.attrs["dims"])]


@rule("argmax", "argmin")
def _argmax(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    return [_reduced(space, op, operands[0].dims, (op.attrs["dim"],))]


def _reduced(space: Space, op: Op, dims: Dims, axes: Sequence[int]) -> Dims:
    space.reduce(op, dims, axes)
    kept: Dims = [[]] if op.attrs["keepdim"] else []
    return [part for axis, atoms in enumerate(dims) for part in (kept if axis in axes else [atoms])]


def _same(space: Space, a: Dims, b: Dims) -> None:
    for left, right in zip(a, b, strict=True):
        space.unify(left, right)


@rule("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
def _softmax(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    dims = operands[0].dims
    for other in operands[1:]:
        _same(space, dims, other.dims)
    space.reduce(op, dims, [op.attrs["dim"]])
    return [dims]


@rule("layer_norm")
def _layer_norm(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    x, axes = operands[0].dims, op.attrs["axes"]
    for parameter in operands[1:]:
        _same(space, x[-axes:], parameter.dims)
    space.reduce(op, x, range(len(x) - axes, len(x)))
    statistic: Dims = [*x[:-axes], *([] for _ in range(axes))]
    return [x, statistic, statistic]


@rule("layer_norm_backward")
def _layer_norm_backward(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    dy, axes = operands[0].dims, op.attrs["axes"]
    _same(space, dy, operands[1].dims)
    for statistic in operands[2:4]:
        _same(space, dy[:-axes], statistic.dims[:-axes])
    for weight in operands[4:]:
        _same(space, dy[-axes:], weight.dims)
    space.reduce(op, dy, range(len(dy) - axes, len(dy)))
    if len(op.results) == 1:
        return [dy]
    space.reduce(op, dy, range(len(dy) - axes))
    return [dy, dy[-axes:], dy[-axes:]]


@rule("batch_norm")
def _batch_norm(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    x = operands[0].dims
    for parameter in operands[1:]:
        space.unify(x[1], parameter.dims[0])
    space.reduce(op, x, [axis for axis in range(len(x)) if axis != 1])
    return [x, x[1:2], x[1:2], x[1:2]]


@rule("batch_norm_backward")
def _batch_norm_backward(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    dy = operands[0].dims
    _same(space, dy, operands[1].dims)
    for channel in operands[2:]:
        space.unify(dy[1], channel.dims[0])
    space.reduce(op, dy, [axis for axis in range(len(dy)) if axis != 1])
    return [dy, dy[1:2], dy[1:2]]


@rule("sce")
def _sce(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    x, target = operands[0].dims, operands[1].dims
    space.unify(x[0], target[0])
    for position, weight in enumerate(operands[2:], 2):
        in_memory(space, op.operands[position])
        space.unify(x[1], weight.dims[0])
    space.reduce(op, x, [1])
    if op.attrs["reduction"] == 0:
        return [x[:1], x[:1]]
    space.reduce(op, x[:1], [0])
    return [[], x[:1]]


@rule("sce_backward")
def _sce_backward(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    dloss, x, target, lse = (operand.dims for operand in operands[:4])
    if op.attrs["reduction"] == 1:
        raise Mismatch("the mean's divisor is a sum over all rows")
    space.unify(x[0], target[0])
    space.unify(x[0], lse[0])
    if dloss:
        space.unify(x[0], dloss[0])
    for position, weight in enumerate(operands[4:], 4):
        in_memory(space, op.operands[position])
        space.unify(x[1], weight.dims[0])
    if op.attrs["has_weight"] and op.attrs["label_smoothing"]:
        space.reduce(op, x, [1])  # the sum of the weights, once a row
    return [x]


@rule("sce_partials")
def _sce_partials(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    x = operands[0].dims
    if len(space.leaves(x[1])) > 1:
        raise Mismatch("the classes are split into several loops")
    for target in operands[1:]:
        space.unify(x[0], target.dims[0])
    space.reduce(op, x, [1])
    count = op.results[0].shape[1]
    tiles = [Atom(count)] if count != 1 else []
    return [[x[0], tiles] for _ in op.results]


@rule("sce_merge")
def _sce_merge(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    maxima, sums, picked, target = (operand.dims for operand in operands[:4])
    _same(space, maxima, sums)
    space.unify(maxima[0], target[0])
    if op.operands[2].shape == op.operands[0].shape and op.operands[2].shape[1] != op.attrs["classes"]:
        _same(space, maxima, picked)
    else:
        in_memory(space, op.operands[2])
    for position in range(4, len(operands)):
        in_memory(space, op.operands[position])
    space.reduce(op, maxima, [1])
    if op.attrs["reduction"] == 0:
        return [maxima[:1], maxima[:1]]
    space.reduce(op, maxima[:1], [0])
    return [[], maxima[:1]]


@rule("matmul")
def _matmul(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    a, b = operands[0].dims, operands[1].dims
    _same(space, a[:-2], b[:-2])
    space.unify(a[-1], b[-2])
    result: Dims = [*a[:-1], b[-1]]
    space.reduce(op, [*result, a[-1]], [len(result)])
    return [result]


@rule("linear")
def _linear(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    x, weight = operands[0].dims, operands[1].dims
    space.unify(x[-1], weight[1])
    for bias in operands[2:]:
        space.unify(weight[0], bias.dims[0])
    result: Dims = [*x[:-1], weight[0]]
    space.reduce(op, [*result, x[-1]], [len(result)])
    return [result]


def _sliding(
    space: Space, op: Op, x: Instance, outs: Dims, taps: Dims, channels: list[Atom], images: list[Atom]
) -> Instance:
    """x [N,C,*S] as a convolution walks it: images, channels, and per spatial dimension a position and a tap."""
    if x.base is None:
        raise Mismatch("slides a window over a value computed in the same kernel")
    spatial = len(outs)
    strides = [(atom, stride) for atom, stride in space.final_strides(x).items()]
    kept = set(space.loops(x.dims[:2]))
    strides = [(atom, stride) for atom, stride in strides if atom in kept]
    for axis in range(spatial):
        step = space.stride_of(x, x.dims[2 + axis])
        for atoms, factor in ((outs[axis], op.attrs["stride"][axis]), (taps[axis], op.attrs["dilation"][axis])):
            distance = step * factor
            for leaf in reversed(space.leaves(atoms)):
                strides.append((leaf, distance))
                distance *= leaf.size
    dims = [images, channels, *([*o, *t] for o, t in zip(outs, taps, strict=True))]
    return Instance(dims, x.base, x.offset, strides)


def _split_channels(space: Space, atoms: list[Atom], groups: int, each: int) -> tuple[list[Atom], list[Atom]]:
    """(group, channel in the group) of a channel dimension."""
    group = [Atom(groups)] if groups != 1 else []
    inner = [Atom(each)] if each != 1 else []
    space.unify(atoms, [*group, *inner])
    return group, inner


@rule("convolution")
def _convolution(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    x, weight = operands
    if any(op.attrs["padding"]) or op.attrs["transposed"]:
        raise Mismatch("pads")
    groups, shape = op.attrs["groups"], op.operands[1].shape
    group, channel = _split_channels(space, x.dims[1], groups, shape[1])
    space.unify(channel, weight.dims[1])
    weight_group, _ = _split_channels(space, weight.dims[0], groups, shape[0] // groups)
    space.unify(group, weight_group)
    outs, taps = fresh(op.results[0].shape[2:]), weight.dims[2:]
    operands[0] = _sliding(space, op, x, outs, taps, x.dims[1], x.dims[0])
    result: Dims = [x.dims[0], weight.dims[0], *outs]
    space.reduce(op, [*result, channel, *taps], range(len(result), len(result) + 1 + len(taps)))
    return [result]


@rule("convolution_backward_weight")
def _convolution_backward_weight(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    dy, x = operands
    if any(op.attrs["padding"]) or op.attrs["transposed"]:
        raise Mismatch("pads")
    groups, shape = op.attrs["groups"], op.results[0].shape
    space.unify(dy.dims[0], x.dims[0])
    group, channel = _split_channels(space, x.dims[1], groups, shape[1])
    dy_group, _ = _split_channels(space, dy.dims[1], groups, shape[0] // groups)
    space.unify(group, dy_group)
    taps = fresh(shape[2:])
    outs = dy.dims[2:]
    operands[1] = _sliding(space, op, x, outs, taps, x.dims[1], x.dims[0])
    result: Dims = [dy.dims[1], channel, *taps]
    space.reduce(op, [*result, dy.dims[0], *outs], range(len(result), len(result) + 1 + len(outs)))
    return [result]


def in_memory(space: Space, value: Value) -> None:
    """A tensor that is indexed by other values must lie in memory, whole; its shape may be another."""
    while (
        value.op is not None
        and value.op.name == "reshape"
        and value not in space.outputs
        and value not in space.materialised
    ):
        value = value.op.operands[0]
    op = value.op
    view = op is not None and value not in space.materialised and (op.name in VIEWS or is_generator(op))
    if view or value in space.outputs:
        raise Mismatch("is indexed as a whole, so it must be in memory")


@rule("take")
def _take(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    in_memory(space, op.operands[0])
    return [[*operands[1].dims, *fresh(op.operands[0].shape[1:])]]


@rule("gather")
def _gather(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    in_memory(space, op.operands[0])
    return [operands[1].dims]


@rule("index")
def _index(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    in_memory(space, op.operands[0])
    x, dims = op.operands[0], op.attrs["dims"]
    shape = op.results[0].shape
    picked_rank = max(len(value.shape) for value in op.operands[1:])
    front = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    picked = broadcast(space, op, operands[1:], shape[front : front + picked_rank])
    rest = fresh([n for axis, n in enumerate(x.shape) if axis not in dims])
    return [[*rest[:front], *picked, *rest[front:]]]


@rule("reverse")
def _reverse(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    in_memory(space, op.operands[0])
    return [fresh(op.results[0].shape)]


@rule("max_pool2d")
def _max_pool2d(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    in_memory(space, op.operands[0])
    dims = fresh(op.results[0].shape)
    window = fresh(op.attrs["kernel"])
    space.reduce(op, [*dims, *window], [4, 5])
    return [dims, dims]


@rule("concat")
def _concat(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    axis = op.attrs["dim"]
    shapes = [value.shape for value in op.operands]
    result = list(operands[0].dims)
    result[axis] = []
    for other in operands:
        for position, atoms in enumerate(other.dims):
            if position != axis:
                space.unify(result[position], atoms)
    if equal_pieces(op):  # the pieces are one loop, selected by its index
        inner = operands[0].dims[axis]
        for other in operands[1:]:
            space.unify(inner, other.dims[axis])
        result[axis] = [Atom(len(shapes)), *inner]
    else:
        result[axis] = [Atom(op.results[0].shape[axis])]
    return [result]


def equal_pieces(op: Op) -> bool:
    """Whether a concat's pieces have one size, so that "which piece" is a loop."""
    axis = op.attrs["dim"]
    return 1 < len(op.operands) <= 4 and len({value.shape[axis] for value in op.operands}) == 1


@rule("pad")
def _pad(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    low, high = op.attrs["low"], op.attrs["high"]
    if min((*low, *high), default=0) < 0:
        raise Mismatch("crops")
    shape = op.results[0].shape
    padded = fresh(shape)
    return [[padded[a] if low[a] or high[a] else operands[0].dims[a] for a in range(len(shape))]]


@rule("slice_scatter")
def _slice_scatter(space: Space, op: Op, operands: list[Instance]) -> list[Dims]:
    base, update = op.operands
    in_memory(space, base)
    if any(step != 1 for step in op.attrs["strides"]):
        in_memory(space, update)
        return [fresh(base.shape)]
    dims = fresh(base.shape)
    for axis in range(len(base.shape)):
        if update.shape[axis] == base.shape[axis]:
            dims[axis] = operands[1].dims[axis]
    return [dims]
