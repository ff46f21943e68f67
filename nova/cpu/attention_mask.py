"""What hides scores or probabilities: boolean and additive masks, and dropout, each applied to a tile S[k][q].

A mask is read as it lies, through strides; a broadcast dim has stride 0 and is never materialised. The dropout mask is
Nova's Philox: the number of an element of the [B, H, T, S] tensor, which never exists, decides whether it is kept.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from nova.cpu.attention_pack import transposed, widen
from nova.cpu.attention_softmax import EXCLUDED, floor_of
from nova.cpu.attention_tiles import Kit, Scope
from nova.lowering import lanes as ln
from nova.lowering.constants import LOG2_E
from nova.lowering.lanes import Type, Value

# --- masks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """The mask's last two dims as a matrix: `row` from query to query, `column` from key to key (0: broadcast)."""

    element: Type
    row: int
    column: int

    @property
    def is_bool(self) -> bool:
        return self.element == ln.int_type(1)

    @property
    def key(self) -> str:
        return f"{self.element}_{self.row}_{self.column}"


def apply_mask(kit: Kit, mask: Mask, source: Value, offset: Value, queries: Value, tile: Value, rows: Value) -> None:
    """Adds the mask to `rows` keys of a score tile, for the first `queries` lanes; `offset` is that of S[0][0]."""
    kit.call(f"mask_{mask.key}", [source, offset, queries, tile, rows], lambda s, *args: _apply_mask(s, mask, *args))


def _masked(s: Scope, mask: Mask, score: Value, entry: Value) -> Value:
    """One score, scalar or vector, under a mask entry of its shape: i1 (keep) or of the compute type (added)."""
    floor = floor_of(s.geometry.element)

    def number(value: float) -> Value:
        return s.constant(score.type, value)

    if mask.is_bool:
        return ln.select(entry, score, number(EXCLUDED))
    bias = ln.mulf(entry, number(LOG2_E))
    value = ln.addf(score, bias)
    value = ln.select(ln.cmpf("olt", bias, number(-floor.threshold)), number(-floor.floor), value)
    return ln.select(ln.cmpf("oeq", entry, number(-math.inf)), number(EXCLUDED), value)


def _apply_mask(s: Scope, mask: Mask, source: Value, offset: Value, queries: Value, tile: Value, rows: Value) -> None:
    if mask.row == 0:
        _apply_key_mask(s, mask, source, offset, tile, rows)
        return
    blocked: Value | int = 0
    if mask.column == 1:
        blocked = _apply_blocks(s, mask, source, offset, queries, tile, rows)
    with s.loop(0, queries) as q:
        start = s.add(offset, s.mul(q, mask.row))
        with s.loop(blocked, rows) as k:
            entry = _load_entry(s, mask, source, s.add(start, s.mul(k, mask.column)))
            place = s.at(tile, s.add(s.mul(k, s.geometry.queries), q))
            ln.store(_masked(s, mask, s.load_scalar(place), entry), place)


def _load_entry(s: Scope, mask: Mask, source: Value, offset: Value | int, lanes: int = 0) -> Value:
    entry = ln.load(s.at(source, offset, mask.element), mask.element, lanes)
    return entry if mask.is_bool else widen(s, entry)


def _apply_key_mask(s: Scope, mask: Mask, source: Value, offset: Value, tile: Value, rows: Value) -> None:
    """The same for every query: one entry a key."""
    g = s.geometry
    with s.loop(0, rows) as k:
        entry = ln.splat(_load_entry(s, mask, source, s.add(offset, s.mul(k, mask.column))), g.lanes)
        row = s.at(tile, s.mul(k, g.queries))
        for h in range(2):
            s.store(_masked(s, mask, s.load(row, h * g.lanes), entry), row, h * g.lanes)


def _apply_blocks(
    s: Scope, mask: Mask, source: Value, offset: Value, queries: Value, tile: Value, rows: Value
) -> Value:
    """Contiguous keys: squares of the mask are transposed in registers. Returns the rows done, whole squares."""
    g = s.geometry
    last, done = s.add(queries, -1), s.mul(ln.divui(rows, s.i(g.lanes)), g.lanes)
    with s.loop(0, g.queries, g.lanes) as half:
        starts = [s.add(offset, s.mul(s.min(last, s.add(half, i)), mask.row)) for i in range(g.lanes)]
        with s.loop(0, done, g.lanes) as k:
            entries = [_load_entry(s, mask, source, s.add(start, k), g.lanes) for start in starts]
            if mask.is_bool:
                entries = [ln.select(entry, s.v(1.0), s.v(0.0)) for entry in entries]
            target = s.at(tile, s.add(s.mul(k, g.queries), half))
            for i, entry in enumerate(transposed(entries)):
                if mask.is_bool:
                    entry = ln.cmpf("ogt", entry, s.v(0.5))
                s.store(_masked(s, mask, s.load(target, i * g.queries), entry), target, i * g.queries)
    return s.i64(done)


# --- dropout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropout:
    """Probability, random stream, and keys per row (the element of (row, key) is row * keys + key)."""

    probability: float
    stream: int
    keys: int


def keep_tile(kit: Kit, dropout: Dropout, seed: Value, element: Value, tile: Value, rows: Value) -> None:
    """tile[k][q] = 1 / (1 - p) where kept, else 0; `element` is the number of tile[0][0], its key a multiple of 4."""
    kit.call("keep", [seed, element, tile, rows], lambda s, *args: _keep_tile(s, dropout, *args))


def _keep_tile(s: Scope, dropout: Dropout, seed: Value, element: Value, tile: Value, rows: Value) -> None:
    """Four keys at a time: a Philox block is four neighbouring elements of a row, which start at any of its words."""
    g = s.geometry
    i32, i64 = ln.int_type(32), ln.int_type(64)
    key = ln.load_raw(seed, i64)
    keys = [ln.splat(ln.cast("trunci", word, i32), g.lanes) for word in (key, ln.shrui(key, s.i(32)))]
    threshold = s.constant(ln.vector_type(i32, g.lanes), math.ceil(_as_f32(dropout.probability) * 2**24))
    kept = s.v(1.0 / (1.0 - dropout.probability) if dropout.probability < 1 else 0.0)
    for h in range(2):
        first = s.add(element, h * g.lanes * dropout.keys)
        lanes = ln.muli(ln.iota(i64, g.lanes), s.constant(ln.vector_type(i64, g.lanes), dropout.keys))
        elements = ln.addi(ln.splat(first, g.lanes), lanes)
        blocks = ln.shrui(elements, s.constant(elements.type, 2))
        phase = ln.cast("trunci", ln.andi(elements, s.constant(elements.type, 3)), i32)
        aligned = dropout.keys % 4 == 0

        def words(at: Value, blocks=blocks) -> list[Value]:
            counter = ln.addi(blocks, ln.splat(at, g.lanes))
            high = ln.cast("trunci", ln.shrui(counter, s.constant(counter.type, 32)), i32)
            return philox(s, (ln.cast("trunci", counter, i32), high), dropout.stream, keys)

        def four(k: Value, now: list[Value], words=words, phase=phase, aligned=aligned, h=h) -> list[Value]:
            block = ln.shrui(k, s.i(2))
            after = words(s.add(block, 1)) if not aligned else []
            now = now or words(block)
            for u in range(4):
                word = now[u]
                for p in range(1, 4) if not aligned else ():
                    other = (now + after)[u + p]
                    word = ln.select(ln.cmpi("eq", phase, s.constant(phase.type, p)), other, word)
                uniform = ln.shrui(word, s.constant(word.type, 8))
                value = ln.select(ln.cmpi("sge", uniform, threshold), kept, s.v(0.0))
                s.store(value, tile, s.add(s.mul(s.add(k, u), g.queries), h * g.lanes))
            return after

        s.carrying(0, rows, 4, [] if aligned else words(s.i(0)), four)


def _as_f32(number: float) -> float:
    """The f32 nearest to `number`: uniform numbers are compared in f32."""
    return struct.unpack("f", struct.pack("f", number))[0]


def philox(s: Scope, counter: tuple[Value, Value], stream: int, keys: list[Value]) -> list[Value]:
    """The four words of Philox4x32-10 for the counters (low, high, stream, 0), a counter a lane."""
    vector = counter[0].type

    def c(number: int) -> Value:
        return s.constant(vector, number)

    words = [*counter, c(stream), c(0)]
    key = list(keys)
    for round_ in range(10):
        low0, high0 = _multiply(words[0], c(0xD2511F53))
        low1, high1 = _multiply(words[2], c(0xCD9E8D57))
        words = [ln.xori(ln.xori(high1, words[1]), key[0]), low1, ln.xori(ln.xori(high0, words[3]), key[1]), low0]
        if round_ < 9:
            key = [ln.addi(key[0], c(0x9E3779B9)), ln.addi(key[1], c(0xBB67AE85))]
    return words


def _multiply(a: Value, b: Value) -> tuple[Value, Value]:
    """Low and high words of the unsigned product."""
    i64 = ln.int_type(64)
    product = ln.muli(ln.cast("extui", a, i64), ln.cast("extui", b, i64))
    high = ln.shrui(product, ln.constant(product.type, 32))
    return ln.cast("trunci", product, ln.int_type(32)), ln.cast("trunci", high, ln.int_type(32))
