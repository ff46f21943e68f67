"""The gradient of an additive mask: the scores' gradient, summed over the mask's broadcast dimensions (stride 0).

A block owns a part of the mask that is not broadcast - a batch and head, a block of queries, a block of keys - and goes
through everything that was, in order. It computes what the query half does, and keeps the gradients of scores instead.
"""

from __future__ import annotations

from nova.fusion.attention_form import Attention
from nova.tile.attention_backward import Half
from nova.tile.attention_mask import Spot
from nova.tile.attention_tiles import CHUNK, Held, Tile, head_of, is_wide, place, products
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout
from nova.tile.text import Operand, Value


class MaskGradient(Half):
    """The program of one mask-gradient op."""

    def __init__(self, name: str, op: Attention, tile: Tile, arguments: int):
        self.over = [stride == 0 for stride in op["dmask"].strides]
        self.blocks = (-(-op.queries // tile.rows), -(-op.keys // tile.columns))
        sizes = (op.batch, op.heads, *self.blocks)
        cells = [1 if over else size for over, size in zip(self.over, sizes, strict=True)]
        self.sizes = [size if over else 1 for over, size in zip(self.over, sizes, strict=True)]
        self.heads = cells[1]
        grid = (cells[0] * cells[1], cells[2], cells[3])
        super().__init__(Program(name, arguments, grid, tile.threads), op, tile, query_dim=0)

    def program(self) -> Program:
        p, tile = self.p, self.tile
        cell = (*head_of(p, self.op, p.program_id(0), self.heads), p.program_id(1), p.program_id(2))
        self.rows = {name: self.matrix(name, tile.rows, 1) for name in ("q", "dout")}
        self.others = {name: self.matrix(name, tile.columns, 1) for name in ("k", "v")}
        shape, layout = self.layout.shape, self.layout
        zeros = [p.splat(0.0, shape, self.op.sums, layout) for _ in range(tile.columns // CHUNK)]
        self._store(self._walk(cell, (), zeros), cell)
        return p

    def _walk(self, cell: tuple[Operand, ...], found: tuple[Operand, ...], tiles: list[Value]) -> list[Value]:
        """Loops over what is broadcast; `found` holds the indices of the outer dimensions."""
        dim = len(found)
        if dim == 4:
            return self._add(found, tiles)
        if not self.over[dim]:
            return self._walk(cell, (*found, cell[dim]), tiles)
        with self.p.for_(0, self.sizes[dim], 1, tiles) as loop:
            loop.yield_(self._walk(cell, (*found, loop.index), loop.carried))
        return loop.results

    def _add(self, found: tuple[Operand, ...], tiles: list[Value]) -> list[Value]:
        p, op, tile, engine = self.p, self.op, self.tile, self.engine
        batch, head, query_block, key_block = found
        query, first = p.mul(query_block, tile.rows), p.mul(key_block, tile.columns)
        p.barrier()  # all threads are done with what the buffers held
        for matrix in self.rows.values():
            matrix.of(batch, head)
            matrix.copy(0, query)
        for matrix in self.others.values():
            matrix.of(batch, p.div(head, op.group))
            matrix.copy(0, first)
        p.async_commit()
        p.async_wait(0)
        p.barrier()
        q, dout = (Held(self.rows[name], hold=False) for name in ("q", "dout"))
        statistics = self.workspace.load(batch, head, query, self.layout.project([1]))
        result = []
        for j, total in enumerate(tiles):
            spot = Spot(batch, head, query, p.add(first, j * CHUNK))
            chunk = products(p, engine, q, self.others["k"], 0, tile, [j])[0]
            product = products(p, engine, dout, self.others["v"], 0, tile, [j])[0]
            probability = self.probabilities(chunk, statistics, spot, edge=True)
            kept = self.scores.kept(spot) if op.dropout_p else None
            result.append(p.binary("arith.addf", total, self.gradient(probability, product, statistics, kept)))
        return result

    def _store(self, tiles: list[Value], cell: tuple[Operand, ...]) -> None:
        p, op, access = self.p, self.op, self.op["dmask"]
        batch, head, query, key = cell[0], cell[1], p.mul(cell[2], self.tile.rows), p.mul(cell[3], self.tile.columns)
        base = place(p, access, batch, head)
        over_query, over_key = self.over[2:]
        if over_key:
            total = tiles[0]
            for tile in tiles[1:]:
                total = p.binary("arith.addf", total, tile)
            tiles = [total]
        for j, tile in enumerate(tiles):
            places = [(query, access.strides[2], op.queries), (p.add(key, j * CHUNK), access.strides[3], op.keys)]
            kept = [found for found, over in zip(places, (over_query, over_key), strict=True) if not over]
            if len(kept) < 2:
                tile = p.reduce(tile, [dim for dim, over in enumerate((over_query, over_key)) if over], "addf")
            if not kept:
                one = NestedLayout((1,), (1,), (1,), (1,), (1,), (0,), (0,))
                tile, kept = p.splat(tile, (1,), op.sums, one), [(0, 1, 1)]
            strides, extents = tuple(stride for _, stride, _ in kept), tuple(extent for _, _, extent in kept)
            p.store(
                p.convert(tile, access.dtype), p.args[access.argument], base, [offset for offset, _, _ in kept],
                strides=strides, extents=extents, wide=is_wide(strides, extents),
            )  # fmt: skip
