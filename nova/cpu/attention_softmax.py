"""The elementwise half of attention: base-2 softmax over a score tile, its mask, and its gradient.

A tile is S[k][q], a query a lane, so a row maximum is a vertical maximum and no step crosses lanes. Scores arrive
scaled by `scale * log2(e)`; excluded ones are the finite EXCLUDED, below the START of the running maximum, so they
come out of exp2 as exact zeros and a row that sees no key ends with sum 0: output and gradients 0, as PyTorch has it,
and log-sum-exp -inf.

A float mask may hold huge negative numbers instead of -inf. A row with nothing else has no room for log(sum) beside
its maximum in one float, so such values are snapped to -FLOOR, and the row's statistic is stored as
-(FLOOR + sum * UNIT), which the backward pass takes apart: gradients of a fully masked row are those of a uniform one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nova.cpu.attention_pack import Matrix, load_element
from nova.cpu.attention_tiles import Kit, Scope
from nova.lowering import lanes as ln
from nova.lowering import vmath
from nova.lowering.constants import LOG2_E
from nova.lowering.lanes import Type, Value

EXCLUDED = -1e30
START = -9e29

_POWER_F32 = [1.3399931183764036e-3, 9.618488973803935e-3, 5.550328777076022e-2, 2.4022646890479687e-1]
_POWER_F32 = [1.5345807519040987e-4, *_POWER_F32, 6.93147205737199e-1, 1.0]
_POWER_F64 = [4.4558179083360645e-10, 7.074194297288521e-09, 1.0178057087733941e-07, 1.3215432535912375e-06]
_POWER_F64 += [1.5252733841556773e-05, 1.5403530463724363e-4, 1.333355814640647e-3, 9.618129107587256e-3]
_POWER_F64 += [5.5504108664821625e-2, 2.4022650695910158e-1, 6.931471805599453e-1, 1.0]


@dataclass(frozen=True)
class Floor:
    """Where a float mask counts as "masked but finite", in base-2 units; powers of two, so all sums are exact."""

    threshold: float
    floor: float
    unit: float


FLOOR_F32 = Floor(2.0**22, 2.0**40, 2.0**17)
FLOOR_F64 = Floor(2.0**40, 2.0**70, 2.0**20)


def floor_of(element: Type) -> Floor:
    return FLOOR_F64 if element == ln.f64() else FLOOR_F32


def exp2(s: Scope, x: Value) -> Value:
    """2^x for x up to the dtype's largest exponent: 2^round(x) from the low bits of a magic sum, times a polynomial.

    Below the least normal exponent the power's exponent field is zero, and so is the result; NaN passes through.
    """
    wide = ln.element_of(x.type) == ln.f64()
    bits, bias, mantissa = (64, 1023, 52) if wide else (32, 127, 23)
    magic = s.v(1.5 * 2.0**mantissa + bias)  # rounds to an integer and leaves its biased exponent in the low bits
    low = s.v(-float(bias))
    x = ln.select(ln.cmpf("ogt", low, x), low, x)
    shifted = ln.addf(x, magic)
    fraction = ln.subf(x, ln.subf(shifted, magic))
    word = ln.cast("bitcast", shifted, ln.int_type(bits))
    power = ln.cast("bitcast", ln.shli(word, s.constant(word.type, mantissa)), s.geometry.element)
    coefficients = _POWER_F64 if wide else _POWER_F32
    result = s.v(coefficients[0])
    for coefficient in coefficients[1:]:
        result = ln.fma(result, fraction, s.v(coefficient))
    return ln.mulf(result, power)


def maximum(a: Value, b: Value) -> Value:
    """One x86 max; b where either is NaN."""
    return ln.select(ln.cmpf("ogt", a, b), a, b)


def _visible(s: Scope, shift: Value, row: Value, half: int) -> Value:
    """Lanes whose query is not before key `row`: lane >= row - shift, shift = first query - first key."""
    g = s.geometry
    integer = ln.int_type(32)
    lanes = ln.iota(integer, g.lanes)
    first = ln.cast("trunci", s.add(ln.subi(row, shift), -half * g.lanes), integer)
    return ln.cmpi("sge", lanes, ln.splat(first, g.lanes))


def _causal_bound(s: Scope, rows: Value, shift: Value | None) -> Value:
    """How many of the first `rows` keys all queries of the panel see."""
    if shift is None:
        return rows
    return s.max(s.min(rows, s.add(shift, 1)), 0)


def softmax_step(
    kit: Kit, tile: Value, maxima: Value, sums: Value, alpha: Value, rows: Value, shift: Value | None
) -> None:
    """One online step over `rows` keys of a score tile, which becomes exp2(score - new maximum).

    Rows up to a multiple of the unroll are zeroed. `alpha` gets the factor by which earlier sums and outputs shrink.
    """
    args = [tile, maxima, sums, alpha, rows] + ([shift] if shift is not None else [])
    kit.call("softmax" if shift is None else "softmax_causal", args, _softmax_step)


def _softmax_step(
    s: Scope, tile: Value, maxima: Value, sums: Value, alpha: Value, rows: Value, shift: Value | None = None
) -> None:
    g = s.geometry
    halves = range(2)
    old = [s.load(maxima, h * g.lanes) for h in halves]
    bound = _causal_bound(s, rows, shift)

    def largest(k: Value, acc: list[Value]) -> list[Value]:
        row = s.at(tile, s.mul(k, g.queries))
        return [maximum(s.load(row, h * g.lanes), acc[h]) for h in halves]

    def largest_masked(k: Value, acc: list[Value]) -> list[Value]:
        row = s.at(tile, s.mul(k, g.queries))
        result = []
        for h in halves:
            value = ln.select(_visible(s, shift, k, h), s.load(row, h * g.lanes), s.v(EXCLUDED))
            s.store(value, row, h * g.lanes)
            result.append(maximum(value, acc[h]))
        return result

    new = s.carrying(0, bound, 1, old, largest)
    if shift is not None:
        new = s.carrying(bound, rows, 1, new, largest_masked)
    factors = [exp2(s, ln.subf(a, b)) for a, b in zip(old, new, strict=True)]
    for h in halves:
        s.store(new[h], maxima, h * g.lanes)
        s.store(factors[h], alpha, h * g.lanes)

    def exponentials(k: Value, acc: list[Value]) -> list[Value]:
        row = s.at(tile, s.mul(k, g.queries))
        values = [exp2(s, ln.subf(s.load(row, h * g.lanes), new[h])) for h in halves]
        for h in halves:
            s.store(values[h], row, h * g.lanes)
        return [ln.addf(a, b) for a, b in zip(acc, values, strict=True)]

    total = s.carrying(0, rows, 1, [s.v(0.0), s.v(0.0)], exponentials)
    for h in halves:
        s.store(ln.fma(s.load(sums, h * g.lanes), factors[h], total[h]), sums, h * g.lanes)
    clear_rows(s, tile, rows, s.round_up(rows, 4))


def clear_rows(s: Scope, tile: Value, begin: Value, end: Value) -> None:
    g = s.geometry
    with s.loop(begin, end) as k:
        row = s.at(tile, s.mul(k, g.queries))
        for h in range(2):
            s.store(s.v(0.0), row, h * g.lanes)


def finish_rows(kit: Kit, maxima: Value, sums: Value, inverse: Value, statistic: Value, has_floor: bool) -> None:
    """inverse = 1 / sum and statistic = ln(2) * maximum + log(sum); 0 and -inf for a row that saw no key."""
    kit.call("finish", [maxima, sums, inverse, statistic], lambda s, *args: _finish_rows(s, has_floor, *args))


def _finish_rows(s: Scope, has_floor: bool, maxima: Value, sums: Value, inverse: Value, statistic: Value) -> None:
    g, floor = s.geometry, floor_of(s.geometry.element)
    for h in range(2):
        most, total = s.load(maxima, h * g.lanes), s.load(sums, h * g.lanes)
        empty = ln.cmpf("oeq", total, s.v(0.0))
        s.store(ln.select(empty, s.v(0.0), ln.divf(s.v(1.0), total)), inverse, h * g.lanes)
        value = ln.fma(most, s.v(math.log(2.0)), vmath.log(total))
        if has_floor:
            packed = ln.subf(s.v(-floor.floor), ln.mulf(total, s.v(floor.unit)))
            value = ln.select(ln.cmpf("ole", most, s.v(-floor.floor / 2)), packed, value)
        s.store(ln.select(empty, s.v(-math.inf), value), statistic, h * g.lanes)


def load_statistics(
    kit: Kit, matrix: Matrix, source: Value, offset: Value, rows: Value, base: Value, lift: Value | None
) -> None:
    """base[q] = the row's log-sum-exp in base 2; lift[q] = what to add to its scores first (see the module's top)."""
    args = [source, offset, rows, base] + ([lift] if lift is not None else [])
    kit.call(f"statistics_{matrix.key}", args, lambda s, *args: _load_statistics(s, matrix, *args))


def _load_statistics(
    s: Scope, matrix: Matrix, source: Value, offset: Value, rows: Value, base: Value, lift: Value | None = None
) -> None:
    g, floor = s.geometry, floor_of(s.geometry.element)
    last = s.add(rows, -1)
    with s.loop(0, g.queries) as q:
        place = s.add(offset, s.mul(s.min(q, last), matrix.row))
        s.store(load_element(s, matrix, source, place), base, q)
    for h in range(2):
        value = s.load(base, h * g.lanes)
        # an empty row: every score is EXCLUDED, and exp2 gives 0 with any finite base
        value = ln.select(ln.cmpf("oeq", value, s.v(-math.inf)), s.v(0.0), value)
        result = ln.mulf(value, s.v(LOG2_E))
        if lift is not None:
            floored = ln.cmpf("ole", value, s.v(-floor.floor / 2))
            total = ln.mulf(ln.subf(ln.negf(value), s.v(floor.floor)), s.v(1.0 / floor.unit))
            total = ln.select(floored, total, s.v(1.0))
            result = ln.select(floored, vmath.log2(total), result)
            s.store(ln.select(floored, s.v(floor.floor), s.v(0.0)), lift, h * g.lanes)
        s.store(result, base, h * g.lanes)


@dataclass(frozen=True)
class GradientOptions:
    """What the gradient step must apply, statically."""

    causal: bool = False
    dropout: bool = False
    lift: bool = False

    @property
    def key(self) -> str:
        return "".join(letter for letter, on in zip("cdl", (self.causal, self.dropout, self.lift), strict=True) if on)


def gradient_step(
    kit: Kit, options: GradientOptions, scores: Value, products: Value, base: Value, delta: Value, rows: Value,
    shift: Value | None = None, keep: Value | None = None, lift: Value | None = None,
) -> None:  # fmt: skip
    """scores -> probabilities (after dropout), products (dO V^T) -> gradients of the scores; zero beyond `rows`."""
    extra = [x for x in (shift, keep, lift) if x is not None]
    args = [scores, products, base, delta, rows, *extra]
    kit.call(f"gradient_{options.key}", args, lambda s, *args: _gradient_step(s, options, *args))


def _gradient_step(
    s: Scope, options: GradientOptions, scores: Value, products: Value, base: Value, delta: Value, rows: Value,
    *extra: Value,
) -> None:  # fmt: skip
    g = s.geometry
    rest = list(extra)
    shift = rest.pop(0) if options.causal else None
    keep = rest.pop(0) if options.dropout else None
    halves = range(2)
    bases = [s.load(base, h * g.lanes) for h in halves]
    deltas = [s.load(delta, h * g.lanes) for h in halves]
    lifts = [s.load(rest[0], h * g.lanes) for h in halves] if options.lift else None

    def row(k: Value, masked: bool) -> None:
        at = s.mul(k, g.queries)
        score_row, product_row = s.at(scores, at), s.at(products, at)
        keep_row = s.at(keep, at) if keep is not None else None
        for h in halves:
            value = s.load(score_row, h * g.lanes)
            if lifts:
                value = ln.addf(value, lifts[h])
            probability = exp2(s, ln.subf(value, bases[h]))
            if masked:
                probability = ln.select(_visible(s, shift, k, h), probability, s.v(0.0))
            product, dropped = s.load(product_row, h * g.lanes), probability
            if keep_row is not None:
                kept = s.load(keep_row, h * g.lanes)
                product, dropped = ln.mulf(product, kept), ln.mulf(probability, kept)
            s.store(dropped, score_row, h * g.lanes)
            s.store(ln.mulf(probability, ln.subf(product, deltas[h])), product_row, h * g.lanes)

    bound = _causal_bound(s, rows, shift)
    with s.loop(0, bound) as k:
        row(k, masked=False)
    if shift is not None:
        with s.loop(bound, rows) as k:
            row(k, masked=True)
    padded = s.round_up(rows, g.row_unit)
    clear_rows(s, scores, rows, padded)
    clear_rows(s, products, rows, padded)
