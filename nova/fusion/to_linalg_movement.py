"""nova-to-linalg: data movement. Gathers index a whole tensor inside the region; assembled tensors are written in
pieces."""

from __future__ import annotations

from collections.abc import Sequence

from nova.fusion import scalars
from nova.fusion.kernel import Expr, Linear, Out, binary, compare, const, convert_float, expr, linear, load, select
from nova.fusion.layout import reshaped_indices
from nova.fusion.lowering import Lowering, lowers
from nova.fusion.records import Op, Value
from nova.fusion.rules import equal_pieces
from nova.fusion.scalars import maximum, minimum
from nova.fusion.space import Dims, Instance

# --- gathers ---------------------------------------------------------------------------------------------------------


def to_index(element: Expr) -> Expr:
    return expr("arith.index_cast", (element,), "index")


def safe_index(low: Lowering, op: Op, value: Value, instance: Instance, size: int) -> Expr:
    """An index in [0, size), read once for each element of the index tensor; a bad one is reported.

    Negative indices count from the end for `index`, as in Python; for the other ops they are bad.
    """
    element = scalars.cast(low.read(value, instance), value.dtype, "i64")
    zero, extent = const(0, "i64"), const(size, "i64")
    bad = compare("uge", element, extent)
    if op.name in ("index", "index_put"):
        wrapped = select(compare("slt", element, zero), binary("arith.addi", element, extent), element)
        bad = compare("uge", wrapped, extent)
    else:
        wrapped = element
    clamped = minimum(maximum(wrapped, zero), const(max(0, size - 1), "i64"))
    loops = low.loops_of(instance.dims)
    tensor, index = low.local(loops, "i64")
    low.emit(loops, [Out(tensor, index, clamped)], checks=[expr("nova.check", (bad, element), "check")])
    return to_index(load(tensor, index))


def extract(low: Lowering, value: Value, indices: Sequence[Expr]) -> Expr:
    """An element of a tensor in memory; the value may be the argument under another shape."""
    source = value
    while source not in low.tensors:
        assert source.op is not None and source.op.name == "reshape", f"{source} is not in memory"
        source = source.op.operands[0]
    tensor = low.tensors[source]
    if source.shape != value.shape:
        indices = reshaped_indices(indices, value.shape, source.shape)
    return expr("tensor.extract", indices, tensor.dtype, tensor)


@lowers("take")
def _take(low: Lowering, op: Op, operands: list[Instance]) -> None:
    table, ids = op.operands
    row = safe_index(low, op, ids, operands[1], table.shape[0])
    rest = low.space.outputs[op.results[0]].dims[len(ids.shape) :]
    low.write(op.results[0], extract(low, table, [row, *map(low.position, rest)]))


@lowers("gather")
def _gather(low: Lowering, op: Op, operands: list[Instance]) -> None:
    x, index = op.operands
    axis = op.attrs["dim"]
    picked = safe_index(low, op, index, operands[1], x.shape[axis])
    places = [picked if a == axis else low.position(atoms) for a, atoms in enumerate(operands[1].dims)]
    low.write(op.results[0], extract(low, x, places))


@lowers("index")
def _index(low: Lowering, op: Op, operands: list[Instance]) -> None:
    x, dims = op.operands[0], op.attrs["dims"]
    picked = {
        dim: safe_index(low, op, value, instance, x.shape[dim])
        for dim, value, instance in zip(dims, op.operands[1:], operands[1:], strict=True)
    }
    result = low.space.outputs[op.results[0]].dims
    front = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    count = max(len(value.shape) for value in op.operands[1:])
    rest = iter([*result[:front], *result[front + count :]])
    places = [picked[axis] if axis in picked else low.position(next(rest)) for axis in range(len(x.shape))]
    low.write(op.results[0], extract(low, x, places))


@lowers("reverse")
def _reverse(low: Lowering, op: Op, operands: list[Instance]) -> None:
    x = op.operands[0]
    places = []
    for axis, atoms in enumerate(low.space.outputs[op.results[0]].dims):
        place = low.position(atoms)
        if axis in op.attrs["dims"]:
            place = binary("arith.subi", const(x.shape[axis] - 1, "index"), place)
        places.append(place)
    low.write(op.results[0], extract(low, x, places))


@lowers("max_pool2d")
def _max_pool2d(low: Lowering, op: Op, operands: list[Instance]) -> None:
    """The window's maximum, then the least index at which it stands."""
    x = op.operands[0]
    reduction = next(r for r in low.space.reductions if r.op is op)
    over = reduction.over
    spatial: list[Expr] = []
    inside: Expr = const(1, "i1")
    for axis in (0, 1):
        step, pad, gap = (op.attrs[name][axis] for name in ("stride", "padding", "dilation"))
        place = binary("arith.muli", low.position(over[2 + axis]), const(step, "index"))
        place = binary("arith.addi", place, binary("arith.muli", low.position(over[4 + axis]), const(gap, "index")))
        place = binary("arith.subi", place, const(pad, "index"))
        size = const(x.shape[2 + axis], "index")
        inside = binary("arith.andi", inside, compare("ult", place, size))
        last = const(x.shape[2 + axis] - 1, "index")
        spatial.append(binary("arith.minsi", binary("arith.maxsi", place, const(0, "index")), last))
    element = extract(low, x, [low.position(over[0]), low.position(over[1]), *spatial])
    type_ = scalars.compute_type(x.dtype)
    wide = convert_float(element, type_) if type_ in ("f32", "f64") else element
    from nova.fusion.to_linalg_reduction import _HIGH, _LOW, fold

    wide = select(inside, wide, const(_LOW[type_], type_))
    top = fold(low, over, [4, 5], wide, "max", x.dtype == "u8")
    low.write(op.results[0], convert_float(top, scalars.element_type(x.dtype)) if type_ in ("f32", "f64") else top)
    hit = compare("oeq" if type_ in ("f32", "f64") else "eq", wide, top)
    if type_ in ("f32", "f64"):
        hit = binary("arith.ori", hit, scalars.isnan(wide))
    flat = binary("arith.addi", binary("arith.muli", spatial[0], const(x.shape[3], "index")), spatial[1])
    number = expr("arith.index_cast", (flat,), "i64")
    number = select(binary("arith.andi", hit, inside), number, const(_HIGH["i64"], "i64"))
    low.write(op.results[1], fold(low, over, [4, 5], number, "min"))


# --- assembled tensors -----------------------------------------------------------------------------------------------


def _piece(low: Lowering, value: Value, starts: Sequence[int], dims: Dims, element: Expr) -> None:
    """Writes `element`, walked by `dims`, into the part of `value` that begins at `starts`."""
    tensor, _ = low.place(value)
    assert tensor.kind == "out", "a value assembled from pieces is a result of its kernel"
    strides, stride = [], 1
    for size in reversed(value.shape):
        strides.append(stride)
        stride *= size
    strides.reverse()
    terms: dict[int, int] = {}
    offset = 0
    for start, axis_stride, atoms in zip(starts, strides, dims, strict=True):
        offset += start * axis_stride
        step = axis_stride
        for leaf in reversed(low.space.leaves(atoms)):
            terms[low.numbers[leaf]] = step
            step *= leaf.size
    low.emit(low.loops_of(dims), [Out(tensor, (Linear.of(terms, offset),), element)])


def _fresh_loops(low: Lowering, sizes: Sequence[int]) -> Dims:
    """New loops, for a part of a tensor that nothing else walks."""
    from nova.fusion.space import Atom

    dims: Dims = []
    for size in sizes:
        if size == 1:
            dims.append([])
            continue
        atom = Atom(size)
        low.numbers[atom] = len(low.kernel.loops)
        low.kernel.loops.append(size)
        dims.append([atom])
    return dims


@lowers("concat")
def _concat(low: Lowering, op: Op, operands: list[Instance]) -> None:
    axis, result = op.attrs["dim"], op.results[0]
    parts = [low.read(value, instance) for value, instance in zip(op.operands, operands, strict=True)]
    if equal_pieces(op):
        which = low.position(low.space.outputs[result].dims[axis][:1])
        element = parts[-1]
        for number in range(len(parts) - 2, -1, -1):
            element = select(compare("eq", which, const(number, "index")), parts[number], element)
        low.write(result, element)
        return
    start = 0
    for value, instance, element in zip(op.operands, operands, parts, strict=True):
        if value.shape[axis]:
            starts = [start if a == axis else 0 for a in range(len(result.shape))]
            _piece(low, result, starts, instance.dims, element)
        start += value.shape[axis]


def _around(
    low: Lowering, value: Value, starts: Sequence[int], sizes: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Disjoint boxes (starts, sizes) that cover `value` except the box at `starts`."""
    boxes = []
    begin, extent = [0] * len(value.shape), list(value.shape)
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        before, after = start - begin[axis], begin[axis] + extent[axis] - start - size
        if before:
            boxes.append(([*begin], [*extent[:axis], before, *extent[axis + 1 :]]))
        if after:
            boxes.append(
                ([*begin[:axis], start + size, *begin[axis + 1 :]], [*extent[:axis], after, *extent[axis + 1 :]])
            )
        begin[axis], extent[axis] = start, size
    return boxes


@lowers("pad")
def _pad(low: Lowering, op: Op, operands: list[Instance]) -> None:
    result, x = op.results[0], op.operands[0]
    filler = const(op.attrs["value"], scalars.element_type(result.dtype))
    _piece(low, result, op.attrs["low"], operands[0].dims, low.read(x, operands[0]))
    for starts, sizes in _around(low, result, op.attrs["low"], x.shape):
        _piece(low, result, starts, _fresh_loops(low, sizes), filler)


@lowers("slice_scatter")
def _slice_scatter(low: Lowering, op: Op, operands: list[Instance]) -> None:
    base, update = op.operands
    result = op.results[0]
    starts, limits, strides = op.attrs["starts"], op.attrs["limits"], op.attrs["strides"]
    dims = low.space.outputs[result].dims
    if any(step != 1 for step in strides):
        inside: Expr = const(1, "i1")
        places = []
        for axis, atoms in enumerate(dims):
            place = low.position(atoms)
            shifted = binary("arith.subi", place, const(starts[axis], "index"))
            step = const(strides[axis], "index")
            hit = compare("ult", shifted, const(limits[axis] - starts[axis], "index"))
            if strides[axis] != 1:
                hit = binary("arith.andi", hit, compare("eq", binary("arith.remui", shifted, step), const(0, "index")))
            inside = binary("arith.andi", inside, hit)
            scaled = binary("arith.divui", shifted, step)
            places.append(binary("arith.minui", scaled, const(max(0, update.shape[axis] - 1), "index")))
        base_element = _element_at(low, base, operands[0], [low.position(atoms) for atoms in dims])
        low.write(result, select(inside, extract(low, update, places), base_element))
        return
    _piece(low, result, starts, operands[1].dims, low.read(update, operands[1]))
    for box_starts, sizes in _around(low, result, starts, update.shape):
        loops = _fresh_loops(low, sizes)
        places = [linear_of(low, atoms, start) for atoms, start in zip(loops, box_starts, strict=True)]
        _piece(low, result, box_starts, loops, _element_at(low, base, operands[0], places))


def linear_of(low: Lowering, atoms: Sequence[object], start: int) -> Expr:
    terms = {low.numbers[atom]: 1 for atom in atoms}  # type: ignore[index]
    return linear(terms, start)


def _element_at(low: Lowering, value: Value, instance: Instance, places: Sequence[Expr]) -> Expr:
    """An element of an operand at explicit indices: from memory, or of a splat constant."""
    if instance.formula is not None and instance.formula[0].name == "constant":
        return low.read(value, instance)
    return extract(low, value, places)
