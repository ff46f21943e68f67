"""Reductions of tiles, in a fixed order: registers as a tree, lanes as a butterfly, warps by shared memory.

    registers   %lo = shuffle %x [0, 1, ..]; %hi = shuffle %x [n/2, ..]; %x = addf %lo, %hi          log2 steps
    lanes       %y = nvvm.shfl.sync bfly %x, 8; %x = addf %x, %y             only the lane bits of the reduced dims;
                of two values each of two threads first takes one: half the shuffles, and one at the end to tell
    warps       store to scratch; barrier; every thread loads what its partners have and combines it in their order;
                where partners are some of the block's warps, the barrier is theirs alone

Reductions that stand one after the other and are alike go through lanes and warps together: one barrier for all.

So every thread that holds an element of the result computes the same bits, on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from nova.errors import CompileError
from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.distribute_layout import through_shared
from nova.gpu.registers import count_of, element_bytes
from nova.gpu.shared_arena import Cut
from nova.tile.layout import WARP, NestedLayout
from nova.tile.text import Operand, Value

HALVES = ("bf16", "f16")
MOST_TOGETHER = 4  # reductions that share a barrier
BARRIERS = 16  # that a block has, by number
SHARED_OUT = 3  # steps of a butterfly from which two threads share their values out


@lowers("nova_tile.reduce")
def reduce(it: Distributor, op: Op) -> None:
    if op.results[0] in it.known:
        return  # together with the one before it
    layout, dims, kind = op["layout"], op["dims"], op["kind"]
    together = [op, *_alike(it, op)]
    tiles = [it.tile(o.operands[0], layout) for o in together]
    left = layout.project(dims)
    parts = [reduce_registers(it, tile, layout, dims, kind) for tile in tiles]
    size = count_of(parts[0])
    total = it.concat(parts) if len(parts) > 1 else parts[0]
    total = reduce_lanes(it, total, layout, dims, kind)
    total = reduce_warps(it, total, layout, dims, kind)
    for number, o in enumerate(together):
        if left.rank:
            it.set(o.results[0], it.take(total, range(number * size, (number + 1) * size), left))
        else:
            it.set(o.results[0], it.extract(total, number))


@lowers("nova_tile.reduce_scatter")
def reduce_scatter(it: Distributor, op: Op) -> None:
    """The shares of the warps, side by side in shared memory; every thread adds up those of the elements it keeps."""
    if op.results[0] in it.known:
        return
    source, target, dims, kind = op["source"], op["layout"], op["dims"], op["kind"]
    together = [op, *_alike(it, op)]
    parts = [reduce_registers(it, it.tile(o.operands[0], source), source, dims, kind) for o in together]
    total = reduce_lanes(it, it.concat(parts), source, dims, kind)
    shares, own = _side_by_side(source, target, dims, len(together))
    total = through_shared(it, Value(total.name, total.element, total.shape, shares), shares, own)
    total = reduce_registers(it, total, own, [d + 1 for d in dims], kind)
    for number, o in enumerate(together):
        it.set(o.results[0], it.take(total, range(number * target.registers, (number + 1) * target.registers), target))


def _side_by_side(
    source: NestedLayout, target: NestedLayout, dims: Sequence[int], count: int
) -> tuple[NestedLayout, NestedLayout]:
    """`count` tiles along a new first dimension, with one element for each warp along `dims`: as they are when the
    lanes are reduced, and with all shares in the registers of the thread that adds them up."""
    left = iter(range(target.rank))
    shares: list[tuple[int, ...]] = []
    own: list[tuple[int, ...]] = []
    for d in range(source.rank):
        warps, stride = source.subgroup[d], source.subgroup_strides[d]
        if d in dims:
            shares.append((warps, 1, 1, 1, 1, stride, 0))
            own.append((1, warps, 1, 1, 1, 0, 0))
        else:
            shares.append(_dimension(source, d))
            own.append(_dimension(target, next(left)))
    first = (1, count, 1, 1, 1, 0, 0)
    return (NestedLayout(*zip(first, *shares, strict=True)), NestedLayout(*zip(first, *own, strict=True)))


def _dimension(layout: NestedLayout, d: int) -> tuple[int, ...]:
    """What a layout says of one dimension, field by field."""
    return tuple(getattr(layout, field.name)[d] for field in fields(layout))


def _alike(it: Distributor, op: Op) -> list[Op]:
    """The reductions right after one that are like it and don't need it: all meet in shared memory at once."""
    found: list[Op] = []
    for operation in it.following():
        if operation.name != op.name or len(found) + 1 == MOST_TOGETHER:
            break
        other = Op(operation)
        same = all(other[key] == op[key] for key in ("source", "layout", "dims", "kind") if key in op)
        made = [o.results[0] for o in (op, *found)]
        if not same or other.operands[0].type != op.operands[0].type or other.operands[0] in made:
            break
        found.append(other)
    return found


def combine(it: Distributor, kind: str, a: Value, b: Value, own: bool = False) -> Value:
    """arith.<kind>, of 16-bit floats by way of f32. `own`: of the thread's registers only, so the first sums may be
    multiply-adds where products are summed. Two threads that exchange products would each leave another one unrounded,
    and have different sums."""
    if a.element in HALVES:
        wide = (it.convert("arith.extf", v, "f32") for v in (a, b))
        return it.convert("arith.truncf", it.binary(f"arith.{kind}", *wide), a.element)
    if kind == "addf" and own:
        count = None if a.shape is None else count_of(a)
        return it.result(f"arith.addf {a.name}, {b.name} fastmath<contract> : {a.type}", a.element, count)
    return it.binary(f"arith.{kind}", a, b)


def tree(it: Distributor, vector: Value, parts: int, kind: str, own: bool = False) -> Value:
    """Combines `parts` equal parts of a vector, which lie one after the other: the first with the middle one, ..."""
    while parts > 1:
        size = count_of(vector) // parts
        half = parts // 2
        low, high = it.take(vector, range(half * size)), it.take(vector, range(half * size, 2 * half * size))
        joined = combine(it, kind, low, high, own)
        if parts % 2:
            joined = it.concat([joined, it.take(vector, range(2 * half * size, parts * size))])
        vector, parts = joined, half + parts % 2
    return vector


def reduce_registers(it: Distributor, tile: Value, layout: NestedLayout, dims: Sequence[int], kind: str) -> Value:
    """Leaves one register for each register of the projected layout."""
    left = layout.project(dims).registers
    registers = np.arange(layout.registers).reshape(layout.register_shape)
    gone = [level * layout.rank + d for level in range(3) for d in sorted(dims)]
    kept = [axis for axis in range(3 * layout.rank) if axis not in gone]
    order = registers.transpose(gone + kept).reshape(-1)
    parts = layout.registers // left
    return tree(it, it.take(tile, order), parts, kind, own=True) if parts > 1 else tile


def lane_masks(layout: NestedLayout, dims: Sequence[int]) -> list[int]:
    """The lane bits that tell elements along `dims` apart, highest first."""
    masks = []
    for dim in dims:
        count, stride = layout.thread[dim], layout.thread_strides[dim]
        if count & (count - 1) or stride & (stride - 1):
            raise CompileError(f"reduce: {count} lanes of stride {stride} along dimension {dim} are no powers of two")
        masks += [stride << bit for bit in range(count.bit_length() - 1)]
    return sorted(masks, reverse=True)


def reduce_lanes(it: Distributor, vector: Value, layout: NestedLayout, dims: Sequence[int], kind: str) -> Value:
    """A butterfly. Where a thread has several values, two threads first share them out, and each goes on with its own:
    a shuffle costs four times an addition."""
    masks = lane_masks(layout, dims)
    split: list[int] = []
    while len(masks) >= SHARED_OUT and count_of(vector) % 2 == 0:
        split.append(masks.pop(0))
        low, high = _halves(it, vector)
        upper = _upper(it, split[-1])
        keep, give = it.select(upper, high, low), it.select(upper, low, high)
        vector = combine(it, kind, keep, it.shuffle_xor(give, split[-1]))
    for mask in masks:
        vector = combine(it, kind, vector, it.shuffle_xor(vector, mask))
    for mask in reversed(split):
        other, upper = it.shuffle_xor(vector, mask), _upper(it, mask)
        vector = it.concat([it.select(upper, other, vector), it.select(upper, vector, other)])
    return vector


def _halves(it: Distributor, vector: Value) -> tuple[Value, Value]:
    half = count_of(vector) // 2
    return it.take(vector, range(half)), it.take(vector, range(half, 2 * half))


def _upper(it: Distributor, mask: int) -> Value:
    """Whether the lane is the upper one of the two that a mask brings together."""
    return it.once(("upper lane", mask), lambda: it.compare("ne", it.int_op("andi", it.lane(), mask), 0))


def reduce_warps(it: Distributor, vector: Value, layout: NestedLayout, dims: Sequence[int], kind: str) -> Value:
    """Scratch is [group of warps][partner][lane][register]; nothing to do if one warp has everything."""
    partners = [d for d in sorted(dims) if layout.subgroup[d] > 1]
    if not partners:
        return vector
    slots = _Slots(it, layout, dims, count_of(vector))
    boolean = vector.element == "i1"
    if boolean:
        vector = it.convert("arith.extui", vector, "i8")
    size = element_bytes(vector.element)
    cut = _cut(it, layout, partners, slots.total * size)
    with it.scratch(slots.total * size, cut) as scratch:
        own = it.offset(scratch, slots.own, vector.element)
        writer = it.first_copy(layout.project(dims), of_lanes=True)
        _write(it, vector, own, writer)
        it.barrier(warps=cut.warps if cut else 0)
        start = it.offset(scratch, slots.group, vector.element)
        if slots.lanes == 1:
            loaded = _read(it, start, 0, slots.registers * slots.partners, vector.element)
        else:
            step = slots.lanes * slots.registers * size
            loaded = it.concat(
                [_read(it, start, p * step, slots.registers, vector.element) for p in range(slots.partners)]
            )
    if boolean:
        loaded = it.as_boolean(loaded)
    return tree(it, loaded, slots.partners, kind)


def _cut(it: Distributor, layout: NestedLayout, dims: Sequence[int], size: int) -> Cut | None:
    """Where the partners are neighbours, and not all warps of the block: their groups need not wait for each other."""
    warps = int(np.prod([layout.subgroup[d] for d in dims]))
    neighbours = {0} | {layout.subgroup_strides[d] * layout.subgroup[d] for d in dims}
    groups = it.threads // (WARP * warps)
    if max(neighbours) != warps or warps & (warps - 1) or it.threads % (WARP * warps):
        return None
    if not 1 < groups <= BARRIERS // 2:
        return None
    return Cut(warps, size)


class _Slots:
    """Where a thread's values lie in the scratch of a reduction across warps; offsets in elements."""

    def __init__(self, it: Distributor, layout: NestedLayout, dims: Sequence[int], registers: int):
        self.registers = registers
        warp = [(layout.subgroup_strides[d], layout.subgroup[d]) for d in range(layout.rank)]
        lane = [(layout.thread_strides[d], layout.thread[d]) for d in range(layout.rank)]
        warps = -(-it.threads // 32)
        self.partners = int(np.prod([warp[d][1] for d in dims]))
        kept = [d for d in range(layout.rank) if d not in dims]
        self.lanes = int(np.prod([lane[d][1] for d in kept], initial=1))
        row = self.lanes * registers  # elements of one partner
        lane_terms, step = [], registers
        for d in reversed(kept):
            lane_terms.append(("lane", *lane[d], step))
            step *= lane[d][1]
        partner_terms, step = [], row
        for d in sorted(dims, reverse=True):
            partner_terms.append(("warp", *warp[d], step))
            step *= warp[d][1]
        group_terms = self._groups(layout, dims, warps, row * self.partners)
        self.total = row * self.partners * (warps // self.partners)
        self.group: Operand = it.thread_sum([*lane_terms, *group_terms])
        self.own: Operand = it.thread_sum([*lane_terms, *partner_terms, *group_terms])

    def _groups(
        self, layout: NestedLayout, dims: Sequence[int], warps: int, size: int
    ) -> list[tuple[str, int, int, int]]:
        """The warp's number with its partners' digits taken out, as digits: copies have groups of their own."""
        taken = sorted((layout.subgroup_strides[d], layout.subgroup[d]) for d in dims if layout.subgroup[d] > 1)
        terms, stride, step = [], 1, size
        for begin, count in [*taken, (warps, 1)]:
            if begin % stride or begin < stride:
                raise CompileError(f"reduce: warps of {layout.text()} along {list(dims)} are not digits of a number")
            terms.append(("warp", stride, begin // stride, step))
            step *= begin // stride
            stride = begin * count
        return terms


def _pieces(count: int, element: str) -> list[tuple[int, int]]:
    """(start, width) of accesses of at most 16 bytes over `count` elements, from an address aligned to all of them."""
    widest = 16 // element_bytes(element)
    pieces, at = [], 0
    while at < count:
        width = widest
        while width > count - at or at % width or count % width:
            width //= 2
        pieces.append((at, width))
        at += width
    return pieces


def _write(it: Distributor, vector: Value, pointer: Value, where: Value | None) -> None:
    size = element_bytes(vector.element)
    for start, width in _pieces(count_of(vector), vector.element):
        piece = it.take(vector, range(start, start + width))
        if where is not None:
            it.store_where(where, it.words(piece, width)[0], pointer, start * size, vector.element, width)
        else:
            it.store(piece, it.offset(pointer, start * size))


def _read(it: Distributor, pointer: Value, constant: int, count: int, element: str) -> Value:
    size = element_bytes(element)
    pieces = _pieces(count, element)
    return it.concat([it.load(it.offset(pointer, constant + start * size), element, width) for start, width in pieces])
