"""What happens to a chunk of scores between the two contractions: scale, masks, causality, dropout.

A chunk is [queries, 16 keys], or [keys, 16 queries] in the key half of backward: `query_dim` says which. Scores are in
base 2. Excluded ones are the finite EXCLUDED, below the START of a running maximum, so they come out of exp2 as exact
zeros and a row that sees no key ends with sum 0: output and gradients 0, log-sum-exp -inf.

A float mask may hold huge negative numbers instead of -inf. A row with nothing else has no room for log(sum) beside its
maximum in one float, so such values are snapped to -FLOOR, and the row's statistic is stored as -(FLOOR + sum * UNIT),
which the backward pass takes apart.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from nova.fusion.attention_form import Access, Attention
from nova.lowering.constants import LOG2_E
from nova.tile import philox
from nova.tile.attention_tiles import access_vector, is_wide, place
from nova.tile.builder import Program
from nova.tile.expressions import Domain, Part
from nova.tile.layout import NestedLayout
from nova.tile.text import Operand, Value

EXCLUDED, START = -1e30, -9e29
FAST = "fastmath = #arith.fastmath<afn>"


class Floor(NamedTuple):
    """Where a float mask counts as "masked but finite", in base-2 units; powers of two, so all sums are exact."""

    threshold: float
    floor: float
    unit: float


FLOORS = {"f32": Floor(2.0**22, 2.0**40, 2.0**17), "f64": Floor(2.0**40, 2.0**70, 2.0**20)}


def exp2(p: Program, x: Value) -> Value:
    """2^x, of f32 by the hardware's approximation; zero for what underflows."""
    return p.unary("math.exp2", x, attrs=FAST if x.element == "f32" else "")


@dataclass(frozen=True)
class Spot:
    """Where a chunk lies: its head, and the query and key of its corner."""

    batch: Operand
    head: Operand
    query: Operand
    key: Operand


def has_floor(op: Attention) -> bool:
    """Whether a row's statistic may be in the split form that float masks need."""
    return op.has("mask") and op["mask"].dtype != "i1"


class Scores:
    """Turns a program's chunks of dot products into base-2 scores, and knows which probabilities dropout keeps."""

    def __init__(self, p: Program, op: Attention, layout: NestedLayout, query_dim: int):
        self.p, self.op, self.layout, self.query_dim = p, op, layout, query_dim
        self.floor = has_floor(op)
        # the scale joins the exponent's multiply-add where nothing is added to the scores
        self.folded = not self.floor and 1e-6 < op.factor < 1e6
        self.factor = op.factor if self.folded else 1.0
        if op.dropout_p:
            self._prepare_dropout()

    def masked(self, scores: Value, spot: Spot, edge: bool) -> Value:
        """Scores with masks applied; `edge`: the chunk may reach over the diagonal or the last key."""
        p, op = self.p, self.op
        if not self.folded:
            scores = p.binary("arith.mulf", scores, op.factor)
        excluded = EXCLUDED / self.factor
        if op.has("mask"):
            scores = self._apply_mask(scores, spot, excluded)
        if not edge:
            return scores
        # coordinates are made here, where they are needed: loops without an edge have no registers to spare for them
        visible, key = [], self._along(1 - self.query_dim)
        if op.causal:
            last = p.binary("arith.addi", self._along(self.query_dim), p.sub(spot.query, spot.key))
            visible.append(p.cmp("sle", self._over(key, 1 - self.query_dim), self._over(last, self.query_dim)))
        if not op.has("mask") and not (op.causal and op.keys >= op.queries):
            visible.append(p.cmp("slt", self._over(key, 1 - self.query_dim), p.sub(op.keys, spot.key)))
        for condition in visible:
            scores = p.select(condition, scores, excluded)
        return scores

    def exponential(self, scores: Value, base: Value, lift: Value | None = None) -> Value:
        """2^(score - base): the probability, for a row's log-sum-exp; `base` is [rows] or [columns] of the chunk."""
        p = self.p
        if lift is not None:
            scores = p.binary("arith.addf", scores, self.spread(lift))
        if not self.folded:
            return exp2(p, p.binary("arith.subf", scores, self.spread(base)))
        return exp2(p, p.fma(scores, self.factor, self.spread(p.unary("arith.negf", base))))

    def spread(self, statistic: Value) -> Value:
        """One number a query, over the chunk."""
        return self._over(statistic, self.query_dim)

    def _along(self, dim: int) -> Value:
        """The chunk's own coordinates along one of its dimensions."""
        return self.p.iota(0, self.layout.project([1 - dim]))

    def _over(self, values: Value, dim: int) -> Value:
        """Values along a dimension, over the chunk."""
        return self.p.expand(values, [1 - dim], self.layout)

    def _apply_mask(self, scores: Value, spot: Spot, excluded: float) -> Value:
        p, access = self.p, self.op["mask"]
        boolean = access.dtype == "i1"
        entry = self._entries(access, spot, 0 if boolean else -math.inf)
        if boolean:
            return p.select(entry, scores, excluded)
        entry = p.convert(entry, self.op.sums)
        bias = p.binary("arith.mulf", entry, LOG2_E)
        value = p.binary("arith.addf", scores, bias)
        threshold, floor, _ = FLOORS[self.op.sums]
        value = p.select(p.cmp("olt", bias, -threshold), -floor, value)
        return p.select(p.cmp("oeq", entry, -math.inf), excluded, value)

    def _entries(self, access: Access, spot: Spot, fill: float) -> Value:
        """The mask under the chunk; `fill` beyond the last query or key."""
        offsets, strides, extents = [spot.query, spot.key], access.strides[2:], (self.op.queries, self.op.keys)
        if self.query_dim == 1:
            offsets, strides, extents = offsets[::-1], strides[::-1], extents[::-1]
        pairs = self.query_dim == 0 and access_vector(access, self.op.keys) % 2 == 0
        return self.p.load(
            self.p.args[access.argument], place(self.p, access, spot.batch, spot.head), offsets, access.dtype,
            self.layout, strides=strides, extents=extents, vector=2 if pairs else 1, fill=fill,
            wide=is_wide(strides, extents),
        )  # fmt: skip

    # --- dropout ---

    def _prepare_dropout(self) -> None:
        p, op = self.p, self.op
        self.domain = Domain(p, self.layout)
        seed = p.load_scalar(p.args[op["seed"].argument], p.scalar(op["seed"].offset, "i64"), "i64")
        self.keys = philox.round_keys(self.domain, Part(seed, (), "i64"))

    def kept(self, spot: Spot) -> Value:
        """1 / (1 - p) where dropout keeps a probability, else 0: decided by its number in [B, H, T, S]."""
        p, op = self.p, self.op
        row: Operand = p.add(p.mul(p.cast(spot.batch, "i64"), op.heads), p.cast(spot.head, "i64"))
        row = p.add(p.mul(row, op.queries), p.cast(spot.query, "i64"))
        first = p.add(p.mul(row, op.keys), p.cast(spot.key, "i64"))
        query_dim, key_dim = self.query_dim, 1 - self.query_dim
        row_part = p.binary("arith.muli", p.convert(self._along(query_dim), "i64"), op.keys)
        row_part = p.binary("arith.addi", row_part, p.scalar(first, "i64"))
        key_part = p.convert(self._along(key_dim), "i64")
        element = p.binary("arith.addi", self._over(row_part, query_dim), self._over(key_part, key_dim))
        word = philox.any_elements(self.domain, self.keys, Part(element, (0, 1), "i64"), op.stream)
        uniform = p.binary("arith.shrui", self.domain.whole(word), 8)
        factor = 1.0 / (1.0 - op.dropout_p) if op.dropout_p < 1 else 0.0
        keep = p.cmp("sge", uniform, math.ceil(_as_f32(op.dropout_p) * 2**24))
        return p.select(keep, p.scalar(factor, op.sums), p.scalar(0.0, op.sums))


def _as_f32(number: float) -> float:
    """The f32 nearest to `number`: uniform numbers are compared in f32."""
    return struct.unpack("f", struct.pack("f", number))[0]


def log_sum_exp(p: Program, op: Attention, most: Value, total: Value) -> Value:
    """What forward saves of rows: their natural log-sum-exp, -inf for a row that saw no key."""
    value = p.fma(most, math.log(2.0), p.unary("math.log", total))
    if has_floor(op):
        _, floor, unit = FLOORS[op.sums]
        packed = p.binary("arith.subf", p.scalar(-floor, op.sums), p.binary("arith.mulf", total, unit))
        value = p.select(p.cmp("ole", most, -floor / 2), packed, value)
    return p.select(p.cmp("oeq", total, 0.0), -math.inf, value)


def bases(p: Program, op: Attention, statistic: Value) -> tuple[Value, Value | None]:
    """(base-2 log-sum-exp, what to add to the row's scores first) from what forward saved."""
    # an empty row: every score is EXCLUDED, and exp2 gives 0 with any finite base
    value = p.select(p.cmp("oeq", statistic, -math.inf), 0.0, statistic)
    base = p.binary("arith.mulf", value, LOG2_E)
    if not has_floor(op):
        return base, None
    _, floor, unit = FLOORS[op.sums]
    floored = p.cmp("ole", value, -floor / 2)
    total = p.binary("arith.mulf", p.binary("arith.subf", p.unary("arith.negf", value), floor), 1.0 / unit)
    total = p.select(floored, total, 1.0)
    lift = p.select(floored, p.scalar(floor, op.sums), p.scalar(0.0, op.sums))
    return p.select(floored, p.unary("math.log2", total), base), lift
