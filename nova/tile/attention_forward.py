"""Attention forward: a block owns some queries of one head and walks its keys once, with a running maximum and sum.

    for each block of keys:
      S = Q K^T    m' = max(m, S)    P = 2^(S - m')    l = l 2^(m - m') + P    O = O 2^(m - m') + P V
    out = O / l    lse = m ln 2 + ln l

Blocks of keys below the diagonal need no mask, so they have a loop of their own; blocks on it, and a ragged last one,
come after. Long rows start first. The sum stays spread over 16 columns until the end.
"""

from __future__ import annotations

from nova.fusion.attention_form import Attention
from nova.tile.attention_mask import START, Scores, Spot, exp2, log_sum_exp
from nova.tile.attention_tiles import (
    CHUNK,
    Accumulator,
    Engine,
    Held,
    Matrix,
    Tile,
    bounds_of,
    head_of,
    is_wide,
    key_bounds,
    pipeline,
    place,
    products,
)
from nova.tile.builder import Program
from nova.tile.layout import mma_accumulator
from nova.tile.text import Operand, Value


class Forward:
    """The program of one forward op."""

    def __init__(self, name: str, op: Attention, tile: Tile, arguments: int):
        self.op, self.tile, self.engine = op, tile, Engine(op["q"].dtype, op.tf32)
        self.blocks = -(-op.queries // tile.rows)
        grid = (op.batch * op.heads, self.blocks, 1)
        self.p = Program(name, arguments, grid, tile.threads, tile.resident)

    def program(self) -> Program:
        p, op, tile = self.p, self.op, self.tile
        batch, head = head_of(p, op, p.program_id(0), op.heads)
        block: Operand = p.program_id(1)
        if op.causal:
            block = p.sub(self.blocks - 1, block)  # the longest rows first
        query = p.mul(block, tile.rows)
        layout = mma_accumulator(tile.rows, CHUNK, tile.warps)
        self.scores = Scores(p, op, layout, query_dim=0)
        self.spot = Spot(batch, head, query, 0)
        self.outputs = Accumulator(self.engine, op.value_dim, tile)
        self._matrices(batch, head)
        self.q.copy(0, query)
        p.async_commit()
        rows = layout.project([1])
        carried = [
            p.splat(START, rows.shape, op.sums, rows), p.splat(0.0, layout.shape, op.sums, layout),
            *self.outputs.zeros(p),
        ]  # fmt: skip
        most, total, *outputs = pipeline(
            p, tile.stages, key_bounds(p, op, tile, query), self._copy, self._step, carried, self._hold
        )
        self._finish(most, p.reduce(total, [1], "addf"), outputs)
        return p

    def _matrices(self, batch: Operand, head: Operand) -> None:
        p, op, tile, engine = self.p, self.op, self.tile, self.engine
        kv_head = p.div(head, op.group)
        self.q = Matrix(p, engine, op["q"], (op.queries, op.dim), tile.rows, 1, tile.warps)
        self.k = Matrix(p, engine, op["k"], (op.keys, op.dim), tile.columns, tile.stages, tile.warps)
        self.v = Matrix(p, engine, op["v"], (op.keys, op.value_dim), tile.columns, tile.stages, tile.warps)
        self.q.of(batch, head)
        self.k.of(batch, kv_head)
        self.v.of(batch, kv_head)

    def _hold(self) -> None:
        self.own = Held(self.q, self.tile.hold)

    def _copy(self, stage: Operand, block: Operand) -> None:
        key = self.p.mul(block, self.tile.columns)
        self.k.copy(stage, key)
        self.v.copy(stage, key)

    def _step(self, stage: Operand, block: Operand, carried: list[Value], edge: bool) -> list[Value]:
        p, tile, scores = self.p, self.tile, self.scores
        most, total, *outputs = carried
        chunks = products(p, self.engine, self.own, self.k, stage, tile, range(tile.columns // CHUNK))
        spots = []
        for j, chunk in enumerate(chunks):
            key = p.add(p.mul(block, tile.columns), j * CHUNK)
            spots.append(Spot(self.spot.batch, self.spot.head, self.spot.query, key))
            chunks[j] = scores.masked(chunk, spots[j], edge)
        peak = chunks[0]
        for chunk in chunks[1:]:
            peak = p.binary("arith.maxnumf", peak, chunk)
        peaks = p.reduce(peak, [1], "maxnumf")
        if scores.folded:
            peaks = p.binary("arith.mulf", peaks, scores.factor)
        new = p.binary("arith.maxnumf", most, peaks)
        shrink = exp2(p, p.binary("arith.subf", most, new))
        chunks = [scores.exponential(chunk, new) for chunk in chunks]
        added = chunks[0]
        for chunk in chunks[1:]:
            added = p.binary("arith.addf", added, chunk)
        total = p.fma(total, scores.spread(shrink), added)
        outputs = self.outputs.scaled(p, outputs, shrink)
        for j, chunk in enumerate(chunks):
            if self.op.dropout_p:
                chunk = p.binary("arith.mulf", chunk, scores.kept(spots[j]))
            left = self.engine.left(p, chunk, tile.rows, tile.warps)
            outputs = self.outputs.add(p, outputs, left, self.v, stage, j * CHUNK)
        return [new, total, *outputs]

    def _finish(self, most: Value, total: Value, outputs: list[Value]) -> None:
        p, op, spot = self.p, self.op, self.spot
        if op.has("out"):
            empty = p.cmp("oeq", total, 0.0)
            fast = "fastmath = #arith.fastmath<arcp>" if op.sums == "f32" else ""
            inverse = p.select(empty, 0.0, p.binary("arith.divf", p.scalar(1.0, op.sums), total, fast))
            base = place(p, op["out"], spot.batch, spot.head)
            outputs = self.outputs.scaled(p, outputs, inverse)
            self.outputs.store(p, outputs, op["out"], base, spot.query, (op.queries, op.value_dim))
        if op.has("lse"):
            access = op["lse"]
            p.store(
                p.convert(log_sum_exp(p, op, most, total), access.dtype), p.args[access.argument],
                place(p, access, spot.batch, spot.head), [spot.query], strides=access.strides[-1:],
                extents=bounds_of([op.queries], [self.tile.rows]), wide=is_wide(access.strides[-1:], (op.queries,)),
            )  # fmt: skip
