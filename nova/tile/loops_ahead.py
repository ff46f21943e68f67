"""Loads that run ahead of their use while a block walks over tiles, so that memory is busy while a tile is computed.

    Ring     cp.async into places of the thread's own in shared memory, `stages` tiles at once      takes no registers
    Queue    into registers, `depth` tiles ahead                     for elements too small to be copied by themselves

Both walk with the tiles: `start` in front of the loop, `step` once a tile, `finish` after the loop. What a loop carries
for them lies in `carried`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nova.tile.builder import Program
from nova.tile.expressions import Part
from nova.tile.loops_body import Body
from nova.tile.loops_plan import Key
from nova.tile.text import Operand, Value


@dataclass(frozen=True)
class Place:
    """The walk: `count` tiles, of which a block takes every `step`-th, in a column of tiles."""

    count: int
    column: Operand
    step: int


class Walk(Protocol):
    """What makes the body of a tile."""

    program: Program
    stages: int
    depth: int

    def body(self, tile: Operand, column: Operand, parts: int) -> Body: ...


def later(program: Program, place: Place, tile: Operand, steps: int) -> Operand:
    """The tile so many further on; the same once more where there is none, which costs no memory traffic."""
    index = program.add(tile, steps * place.step)
    return program.select(program.compare("slt", index, place.count), index, program.scalar(tile))


def ahead_of_use(walk: Walk, first: Body, place: Place) -> list[Ring | Queue]:
    """What brings the values that differ from tile to tile; `first` is the first tile's body."""
    if not walk.depth and not walk.stages:
        return []
    keys = [*first.wide_keys(), *first.row_keys()]
    ring = [key for key in keys if first.stageable(*key) is not None] if walk.stages else []
    rest = [key for key in keys if key not in ring]
    found: list[Ring | Queue] = []
    if ring:
        found.append(Ring(walk, first, ring, place))
    if rest:
        found.append(Queue(walk, first, rest, place))
    return found


class Ring:
    """Tiles on their way through shared memory. The loop carries the slot of the tile that is due."""

    length = 1
    turn = 2  # tiles a turn of the loop: then the scratch of their reductions needs no barrier at its top

    def __init__(self, walk: Walk, first: Body, keys: Sequence[Key], place: Place):
        self.walk, self.program, self.keys, self.place = walk, walk.program, keys, place
        self.stages = walk.stages
        self.shared = {key: first.places(*key, self.stages) for key in keys}
        self.carried: list[Value] = []

    def start(self, tile: Operand) -> list[Value]:
        for step in range(self.stages - 1):
            self.fill(later(self.program, self.place, tile, step) if step else tile, step)
        return [self.program.scalar(0)]

    def fill(self, tile: Operand, slot: Operand) -> None:
        body = self.walk.body(tile, self.place.column, self.place.step)
        for key in self.keys:
            body.stage(*key, self.shared[key], slot)
        self.program.async_commit()

    def step(self, body: Body, tile: Operand) -> None:
        """Takes the tile's values from its slot, and fills the one that the tile before it has left."""
        program, (slot,) = self.program, self.carried
        program.async_wait(self.stages - 2)
        for key in self.keys:
            body.values[key] = body.staged(*key, self.shared[key], slot)
        before = program.rem(program.add(slot, self.stages - 1), self.stages)
        self.fill(later(program, self.place, tile, self.stages - 1), before)
        self.carried = [program.scalar(program.rem(program.add(slot, 1), self.stages))]

    def finish(self) -> None:
        """Nothing may still be on its way to places that others take over."""
        self.program.async_wait(0)


class Queue:
    """Values under way in registers, those of the next tile first.

    A turn of the loop takes `depth` tiles: then what was loaded for a tile stays in its registers until its turn.
    Handing it on from register to register would wait for it, a whole tile too early.
    """

    def __init__(self, walk: Walk, first: Body, keys: Sequence[Key], place: Place):
        self.walk, self.domain, self.keys, self.place = walk, first.domain, keys, place
        self.depth = self.turn = max(walk.depth, 1)
        self.length = len(keys) * self.depth
        self.parts = [first.load(*key) for key in keys]
        self.carried: list[Value] = []

    def start(self, tile: Operand) -> list[Value]:
        values = [self.domain.value(p) for p in self.parts]
        for step in range(1, self.depth):
            values += self.load(later(self.walk.program, self.place, tile, step))
        return values

    def step(self, body: Body, tile: Operand) -> None:
        """Gives a tile what was loaded for it, and begins the loads of a later one."""
        self.carried += self.load(later(self.walk.program, self.place, tile, self.depth))
        for key, p, value in zip(self.keys, self.parts, self.carried, strict=False):
            body.values[key] = Part(value, p.dims, p.element)
        self.carried = self.carried[len(self.keys) :]

    def load(self, tile: Operand) -> list[Value]:
        body = self.walk.body(tile, self.place.column, self.place.step)
        return [body.domain.value(body.load(*key)) for key in self.keys]

    def finish(self) -> None:
        pass
