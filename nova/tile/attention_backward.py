"""Attention backward: probabilities are recomputed from the saved log-sum-exp, block by block, in two halves.

    query half   S = Q K^T    P = 2^(S - lse)     dP = dO V^T    dS = P (dP - delta)       dQ += dS K
    key half     S' = K Q^T   P' = 2^(S' - lse)   dP' = V dO^T   dS' = P' (dP' - delta)    dK += dS' Q    dV += P' dO

A block of the query half owns queries; one of the key half owns keys and computes transposed scores, so that they are
left operands in the registers they are in. What both need of every row is in attention_statistics.py.
"""

from __future__ import annotations

import math

from nova.fusion.attention_form import Attention
from nova.schedule.target import ELEMENT_BYTES
from nova.tile.attention_mask import Scores, Spot
from nova.tile.attention_statistics import Workspace, accumulator_rows, planes, statistics
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
from nova.tile.layout import NestedLayout, mma_accumulator
from nova.tile.text import Operand, Value


class Half:
    """What both halves share: the gradient of a chunk of scores."""

    def __init__(self, p: Program, op: Attention, tile: Tile, query_dim: int):
        self.p, self.op, self.tile, self.engine = p, op, tile, Engine(op["q"].dtype, op.tf32)
        self.layout = mma_accumulator(tile.rows, CHUNK, tile.warps)
        self.scores = Scores(p, op, self.layout, query_dim)
        self.workspace = Workspace(p, op)

    def matrix(self, name: str, rows: int, stages: int, *indices: Operand) -> Matrix:
        op = self.op
        extents = {
            "q": (op.queries, op.dim), "k": (op.keys, op.dim), "v": (op.keys, op.value_dim),
            "dout": (op.queries, op.value_dim),
        }[name]  # fmt: skip
        matrix = Matrix(self.p, self.engine, op[name], extents, rows, stages, self.tile.warps)
        matrix.of(*indices)
        return matrix

    def probabilities(self, chunk: Value, rows: list[Value], spot: Spot, edge: bool) -> Value:
        """From dot products; `rows`: the statistics of the chunk's queries."""
        base, _, *lift = rows
        return self.scores.exponential(self.scores.masked(chunk, spot, edge), base, lift[0] if lift else None)

    def gradient(self, probability: Value, product: Value, rows: list[Value], kept: Value | None) -> Value:
        """Of the base-e scores before the scale; `product` is dO V^T."""
        p = self.p
        if kept is not None:
            product = p.binary("arith.mulf", product, kept)
        difference = p.binary("arith.subf", product, self.scores.spread(rows[1]))
        return p.binary("arith.mulf", probability, difference)

    def scaled(self, tiles: list[Value]) -> list[Value]:
        return [self.p.binary("arith.mulf", tile, self.op.scale) for tile in tiles]


class Query(Half):
    """The program of the query half: dQ."""

    def __init__(self, name: str, op: Attention, tile: Tile, arguments: int):
        self.blocks = -(-op.queries // tile.rows)
        grid = (op.batch * op.heads, self.blocks, 1)
        super().__init__(Program(name, arguments, grid, tile.threads, tile.resident), op, tile, query_dim=0)

    def program(self) -> Program:
        p, op, tile = self.p, self.op, self.tile
        batch, head = head_of(p, op, p.program_id(0), op.heads)
        block: Operand = p.program_id(1)
        if op.causal:
            block = p.sub(self.blocks - 1, block)  # the longest rows first
        query = p.mul(block, tile.rows)
        self.spot = Spot(batch, head, query, 0)
        self.rows = [self.matrix(name, tile.rows, 1, batch, head) for name in ("q", "dout")]
        kv_head = p.div(head, op.group)
        self.k, self.v = (self.matrix(name, tile.columns, tile.stages, batch, kv_head) for name in ("k", "v"))
        for matrix in self.rows:
            matrix.copy(0, query)
        p.async_commit()
        layout, vector = accumulator_rows(op, tile)
        self.statistics = statistics(p, op, batch, head, query, layout, vector)
        self.workspace.store(self.statistics, batch, head, query)
        self.gradients = Accumulator(self.engine, op.dim, tile)
        bounds = key_bounds(p, op, tile, query)
        tiles = pipeline(p, tile.stages, bounds, self._copy, self._step, self.gradients.zeros(p), self._hold)
        base = place(p, op["dq"], batch, head)
        self.gradients.store(p, self.scaled(tiles), op["dq"], base, query, (op.queries, op.dim))
        return p

    def _hold(self) -> None:
        self.own_q, self.own_dout = (Held(matrix, self.tile.hold) for matrix in self.rows)

    def _copy(self, stage: Operand, block: Operand) -> None:
        key = self.p.mul(block, self.tile.columns)
        self.k.copy(stage, key)
        self.v.copy(stage, key)

    def _step(self, stage: Operand, block: Operand, tiles: list[Value], edge: bool) -> list[Value]:
        p, tile, engine = self.p, self.tile, self.engine
        for j in range(tile.columns // CHUNK):
            key = p.add(p.mul(block, tile.columns), j * CHUNK)
            spot = Spot(self.spot.batch, self.spot.head, self.spot.query, key)
            chunk = products(p, engine, self.own_q, self.k, stage, tile, [j])[0]
            product = products(p, engine, self.own_dout, self.v, stage, tile, [j])[0]
            probability = self.probabilities(chunk, self.statistics, spot, edge)
            kept = self.scores.kept(spot) if self.op.dropout_p else None
            gradient = self.gradient(probability, product, self.statistics, kept)
            left = engine.left(p, gradient, tile.rows, tile.warps)
            tiles = self.gradients.add(p, tiles, left, self.k, stage, j * CHUNK)
        return tiles


class Key(Half):
    """The program of the key half: dK and dV, or one of them where the accumulators of both have no room."""

    def __init__(self, name: str, op: Attention, tile: Tile, arguments: int, tensors: list[str]):
        self.blocks = -(-op.keys // tile.rows)
        grid = (op.batch * op.kv_heads, self.blocks, 1)
        super().__init__(Program(name, arguments, grid, tile.threads, tile.resident), op, tile, query_dim=1)
        self.tensors = tensors

    def program(self) -> Program:
        p, op, tile = self.p, self.op, self.tile
        self.batch, self.kv_head = head_of(p, op, p.program_id(0), op.kv_heads)
        self.first = p.mul(p.program_id(1), tile.rows)
        with_dk = "dk" in self.tensors
        self.rows = [
            self.matrix(name, tile.rows, 1, self.batch, self.kv_head) for name in (("k", "v") if with_dk else ("k",))
        ]
        self.q, self.dout = (self.matrix(name, tile.columns, tile.stages) for name in ("q", "dout"))
        self.shared = p.alloc_shared(tile.stages, planes(op), tile.columns, op.sums, swizzle="none")
        self.sums = {
            name: Accumulator(self.engine, op.dim if name == "dk" else op.value_dim, tile) for name in self.tensors
        }
        for matrix in self.rows:
            matrix.copy(0, self.first)
        p.async_commit()
        carried = [tile for name in self.tensors for tile in self.sums[name].zeros(p)]
        head: Operand = p.mul(self.kv_head, op.group)
        if op.group == 1:
            carried = self._walk(head, carried)
        else:
            with p.for_(0, op.group, 1, carried) as loop:
                p.barrier()  # all threads are done with the head before
                loop.yield_(self._walk(p.add(head, loop.index), loop.carried))
            carried = loop.results
        self._store(carried)
        return p

    def _walk(self, head: Operand, carried: list[Value]) -> list[Value]:
        """All queries of one head."""
        p, op, tile = self.p, self.op, self.tile
        self.head = head
        for matrix in (self.q, self.dout):
            matrix.of(self.batch, head)
        self.at = self.workspace.base(self.batch, head)
        last = -(-op.queries // tile.columns)
        bounds: list[tuple[Operand, Operand, bool]] = [(0, last, op.has("mask"))]
        if op.causal:
            begin = p.min(p.div(self.first, tile.columns), last)
            full = p.min(p.cdiv(p.add(self.first, tile.rows - 1), tile.columns), last)
            bounds = [(begin, full, True), (full, last, False)]
        return pipeline(p, tile.stages, bounds, self._copy, self._step, carried, self._hold)

    def _hold(self) -> None:
        self.own = [Held(matrix, self.tile.hold) for matrix in self.rows]

    def _copy(self, stage: Operand, block: Operand) -> None:
        p, op = self.p, self.op
        query = p.mul(block, self.tile.columns)
        self.q.copy(stage, query)
        self.dout.copy(stage, query)
        strides = (self.workspace.plane, 1)
        p.async_copy(
            self.workspace.pointer, self.shared, stage, self.at, [0, query], strides=strides,
            extents=[-1, *bounds_of([op.queries], [self.tile.columns])],
            vector=math.gcd(op.queries, 16 // ELEMENT_BYTES[op.sums]), wide=is_wide(strides, (planes(op), op.queries)),
        )  # fmt: skip

    def _step(self, stage: Operand, block: Operand, carried: list[Value], edge: bool) -> list[Value]:
        p, tile, engine = self.p, self.tile, self.engine
        tiles, rest = {}, list(carried)
        for name in self.tensors:
            tiles[name], rest = rest[: len(self.sums[name].starts)], rest[len(self.sums[name].starts) :]
        for j in range(tile.columns // CHUNK):
            query = p.add(p.mul(block, tile.columns), j * CHUNK)
            spot = Spot(self.batch, self.head, query, self.first)
            rows = [self._statistic(number, stage, j) for number in range(planes(self.op))]
            chunk = products(p, engine, self.own[0], self.q, stage, tile, [j])[0]
            probability = self.probabilities(chunk, rows, spot, edge)
            kept = self.scores.kept(spot) if self.op.dropout_p else None
            if "dv" in tiles:
                dropped = probability if kept is None else p.binary("arith.mulf", probability, kept)
                left = engine.left(p, dropped, tile.rows, tile.warps)
                tiles["dv"] = self.sums["dv"].add(p, tiles["dv"], left, self.dout, stage, j * CHUNK)
            if "dk" in tiles:
                product = products(p, engine, self.own[1], self.dout, stage, tile, [j])[0]
                gradient = self.gradient(probability, product, rows, kept)
                left = engine.left(p, gradient, tile.rows, tile.warps)
                tiles["dk"] = self.sums["dk"].add(p, tiles["dk"], left, self.q, stage, j * CHUNK)
        return [tile for name in self.tensors for tile in tiles[name]]

    def _statistic(self, number: int, stage: Operand, chunk: int) -> Value:
        """[16]: one statistic of the chunk's queries."""
        of = self.layout.project([0])
        sizes = ((1, *n) for n in (of.subgroup, of.batch, of.outer, of.thread, of.element))
        strides = ((0, *n) for n in (of.subgroup_strides, of.thread_strides))
        one = NestedLayout(*sizes, *strides)  # [1, 16]
        tile = self.p.load_shared(self.shared, stage, [number, chunk * CHUNK], self.op.sums, one)
        return self.p.reduce(tile, [0], "addf")

    def _store(self, carried: list[Value]) -> None:
        p, op, rest = self.p, self.op, list(carried)
        for name in self.tensors:
            count = len(self.sums[name].starts)
            tiles, rest = rest[:count], rest[count:]
            dim = op.dim if name == "dk" else op.value_dim
            tiles = self.scaled(tiles) if name == "dk" else tiles
            base = place(p, op[name], self.batch, self.kv_head)
            self.sums[name].store(p, tiles, op[name], base, self.first, (op.keys, dim))
