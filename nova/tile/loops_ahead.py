"""Loads that run ahead of their use while a block walks over tiles, so that memory is busy while a tile is computed.

    %x, %next = iter_args         tile i, tile i + 1, in registers
    %later = load tile i + 2      begun before tile i is computed; tile i again where there is none

A turn of the loop takes `depth` tiles: then what was loaded for a tile stays in its registers until its turn. Handing
it on from register to register would wait for it, a whole tile too early. (On an H200 8-byte cp.async into shared
memory, which takes no registers, was slower, and so were prefetches into the last cache.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nova.tile.builder import Program
from nova.tile.expressions import Part
from nova.tile.loops_body import Body
from nova.tile.text import Operand, Value


@dataclass(frozen=True)
class Tiles:
    """What is walked over: `count` tiles, of which a block takes every `step`-th, in a column of tiles."""

    count: int
    column: Operand
    step: int


class Walk(Protocol):
    """What makes the body of a tile."""

    program: Program

    def body(self, tile: Operand, column: Operand, parts: int) -> Body: ...


class Queue:
    """What is read of the nest's full width and for each row, `depth` tiles ahead; nothing if that is 0.

    `start` in front of the loop, `step` once a tile; what the loop carries in between lies in `carried`, the next
    tile's values first.
    """

    def __init__(self, walk: Walk, first: Body, depth: int, tiles: Tiles):
        self.walk, self.domain, self.depth, self.tiles = walk, first.domain, depth, tiles
        self.keys = [*first.wide_keys(), *first.row_keys()] if depth else []
        self.parts = [first.load(*key) for key in self.keys]
        self.carried: list[Value] = []

    @property
    def turn(self) -> int:
        """Tiles that a turn of the loop takes."""
        return self.depth if self.keys else 1

    def start(self, tile: Operand) -> list[Value]:
        """Under way before the loop: the first tile's, loaded already, and those of the tiles after it."""
        values = [self.domain.value(p) for p in self.parts]
        for step in range(1, self.turn):
            values += self._load(self._later(tile, step))
        return values

    def step(self, body: Body, tile: Operand) -> None:
        """Gives a tile what was loaded for it, and begins the loads of a later one."""
        if not self.keys:
            return
        self.carried += self._load(self._later(tile, self.depth))
        for key, p, value in zip(self.keys, self.parts, self.carried, strict=False):
            body.values[key] = Part(value, p.dims, p.element)
        self.carried = self.carried[len(self.keys) :]

    def _later(self, tile: Operand, steps: int) -> Operand:
        """The tile so many further on; the same once more where there is none, which costs no memory traffic."""
        program = self.walk.program
        index = program.add(tile, steps * self.tiles.step)
        return program.select(program.compare("slt", index, self.tiles.count), index, program.scalar(tile))

    def _load(self, tile: Operand) -> Sequence[Value]:
        body = self.walk.body(tile, self.tiles.column, self.tiles.step)
        return [body.domain.value(body.load(*key)) for key in self.keys]
