"""remat: computes cheap activations again in the backward instead of keeping them from the forward.

    %h = nova.gelu(%pre)                       %h  = nova.gelu(%pre)
    %y = nova.linear(%h, ..)                   %y  = nova.linear(%h, ..)             %h dies here
    ... a hundred ops ...                 =>   ... a hundred ops ...
    %dw = nova.matmul(%dyT, %h)                %dp = nova.gelu_backward(%dh, %pre)
    %dp = nova.gelu_backward(%dh, %pre)        %h2 = nova.gelu(%pre)                 same epilogue as %dp
                                               %dw = nova.matmul(%dyT, %h2)

A value is computed again if it is large, nothing reads it over a long stretch of the step, and what it is made of is
live at the far end anyway (or is made of such values itself, a few ops deep). So memory falls and nothing new is kept.
A contraction that reads it sinks behind the next op that reads the same source: the copy joins that op's kernel.
`nova.layer_norm` counts as elementwise given its saved statistics. Runs after `simplify`, whose CSE would undo it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nova.dialect.build import Builder, wrap
from nova.dialect.types import BYTES, describe, numel
from nova.fusion.rules import ELEMENTWISE
from nova.fusion.space import VIEWS
from nova.mlir import context, ir

AGAIN = "nova.again"  # marks copies: dispatch formation keeps them where they stand
MIN_BYTES = 1 << 17  # smaller values are not worth a kernel
MIN_GAP = 24  # ops during which nobody reads the value
MAX_CHAIN = 4  # ops computed again for one value
SINK_WINDOW = 32  # how far a reader may sink to meet an op that reads the same source
CONTRACTIONS = ("nova.matmul", "nova.linear")


@dataclass
class Item:
    """An op of the step, by position."""

    op: ir.Operation
    position: int
    name: str
    results: list[ir.Value]
    readers: list[list[Item]] = field(default_factory=list)  # per result


class Step:
    """Positions and readers of one function, read once."""

    def __init__(self, block: ir.Block):
        self.items: list[Item] = []
        self.home: dict[ir.Value, tuple[Item, int]] = {}
        for position, view in enumerate(block.operations):
            operation = view.operation
            results = list(operation.results)
            item = Item(operation, position, operation.name, results, [[] for _ in results])
            self.items.append(item)
            for value in operation.operands:
                if value in self.home:
                    maker, index = self.home[value]
                    maker.readers[index].append(item)
            for index, value in enumerate(results):
                self.home[value] = item, index

    def uses(self, item: Item, result: int) -> list[Item]:
        """Ops that read the value, looking through views; a view that leaves the step counts where it stands."""
        found: dict[int, Item] = {}
        for reader in item.readers[result]:
            through = self.uses(reader, 0) if is_view(reader) else []
            for use in through or [reader]:
                found[use.position] = use
        return [found[p] for p in sorted(found)]

    def root(self, value: ir.Value) -> ir.Value:
        """The value behind a chain of views."""
        found = self.home.get(value)
        while found is not None and is_view(found[0]):
            value = found[0].op.operands[0]
            found = self.home.get(value)
        return value

    def source(self, value: ir.Value) -> tuple[Item, int] | None:
        """What a chain of views reads: (op, result), or None for an argument of the step."""
        return self.home.get(self.root(value))


def is_view(item: Item) -> bool:
    return item.name.removeprefix("nova.") in VIEWS


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Rewrites @step in place."""
    with context(), ir.Location.unknown():
        for function in module.body.operations:
            if function.operation.name == "func.func" and function.operation.regions[0].blocks:
                _rematerialise(function.operation.regions[0].blocks[0])
    return module


def _rematerialise(block: ir.Block) -> None:
    step = Step(block)
    pinned: set[tuple[int, int]] = set()  # sources that a copy relies on
    for item in reversed(step.items):
        if not _cheap(item) or (item.position, 0) in pinned or size(item.results[0]) < MIN_BYTES:
            continue
        uses = step.uses(item, 0)
        late = _after_gap(item, uses)
        if not late or any(use.name == "func.return" for use in uses):
            continue
        chain = _chain(step, item, late[0].position, MAX_CHAIN)
        if chain is not None:
            pinned.update(chain.relies_on)
            _compute_again(step, item, late, chain)


def _cheap(item: Item) -> bool:
    if item.name == "nova.cast" and isinstance(item.op.operands[0].owner, ir.Block):
        return False  # a parameter for a contraction: all of them are cast at once, and the backward wants them too
    return item.name.removeprefix("nova.") in ELEMENTWISE or item.name == "nova.layer_norm"


def size(value: ir.Value) -> int:
    described = describe(value.type)
    return numel(described.shape) * BYTES[described.dtype]


def _after_gap(item: Item, uses: list[Item]) -> list[Item]:
    """The uses behind the longest stretch without one, if it is long."""
    points = [item.position, *(use.position for use in uses)]
    gaps = [b - a for a, b in pairwise(points)]
    if not gaps or max(gaps) < MIN_GAP:
        return []
    return uses[gaps.index(max(gaps)) :]


@dataclass
class Chain:
    """Ops to compute again, in order, and the values that they rely on."""

    items: list[Item] = field(default_factory=list)
    relies_on: set[tuple[int, int]] = field(default_factory=set)


def _chain(step: Step, item: Item, at: int, depth: int) -> Chain | None:
    """How to compute `item` at position `at` from what is live there; None if that would keep something alive."""
    if depth == 0:
        return None
    chain = Chain()
    operands = list(item.op.operands)
    if item.name == "nova.layer_norm":  # its statistics are small and kept
        chain.relies_on |= {(item.position, 1), (item.position, 2)}
    for value in operands:
        source = step.source(value)
        if source is None:
            continue  # an argument: state is overwritten at the end only
        maker, index = source
        last = max((use.position for use in step.uses(maker, index)), default=0)
        if last >= at or maker.name == "nova.constant" or size(maker.results[index]) * 16 <= size(item.results[0]):
            chain.relies_on.add((maker.position, index))
            continue
        if not _cheap(maker) or maker.name == "nova.layer_norm" or index:
            return None
        deeper = _chain(step, maker, at, depth - 1)
        if deeper is None:
            return None
        chain.items += [i for i in deeper.items if i not in chain.items]
        chain.relies_on |= deeper.relies_on
    chain.items.append(item)
    return chain if len(chain.items) <= MAX_CHAIN else None


def _compute_again(step: Step, item: Item, late: list[Item], chain: Chain) -> None:
    """Copies the chain in front of the first late use, and points the late uses at the copy."""
    anchor = _sink(step, late, chain) or late[0].op
    insert = ir.InsertionPoint(anchor)
    copies: dict[ir.Value, ir.Value] = {}

    def copied(value: ir.Value) -> ir.Value:
        """The value at the anchor: a copy if it is computed again, with its views."""
        if value in copies:
            return copies[value]
        found = step.home.get(value)
        if found is not None and is_view(found[0]):
            inner = found[0].op.operands[0]
            moved = copied(inner)
            if moved != inner:
                clone = found[0].op.clone(insert)
                clone.operation.operands[0] = moved
                copies[value] = clone.operation.results[0]
                return copies[value]
        return value

    for part in chain.items:
        copies[part.results[0]] = _copy(part, copied, insert)
    for use in late:
        for position, value in enumerate(list(use.op.operands)):
            source = step.source(value)
            if source is not None and source[0] is item and source[1] == 0:
                use.op.operands[position] = copied(value)


def _copy(item: Item, copied: Any, insert: ir.InsertionPoint) -> ir.Value:
    if item.name != "nova.layer_norm":
        clone = item.op.clone(insert)
        for position, value in enumerate(list(item.op.operands)):
            clone.operation.operands[position] = copied(value)
        return _mark(clone.operation.results[0])
    build = Builder(insert)
    operands = [wrap(copied(v)) for v in item.op.operands]
    mean, rstd = wrap(item.results[1]), wrap(item.results[2])
    with item.op.location:
        y = build.op("sub", operands[0], mean)
        for name, parameter in zip(("mul", "mul", "add"), (rstd, *operands[1:]), strict=False):
            _mark(y.ir)
            y = build.op(name, y, parameter)
    return _mark(y.ir)


def _mark(value: ir.Value) -> ir.Value:
    value.owner.attributes[AGAIN] = ir.BoolAttr.get(True)
    return value


def _sink(step: Step, late: list[Item], chain: Chain) -> ir.Operation | None:
    """Moves a lone late reader behind the next op that reads what the chain reads; the op that follows it there."""
    use = late[0]
    if len(late) != 1 or use.name not in CONTRACTIONS:
        return None
    wanted = {step.root(v) for i in chain.items for v in i.op.operands}
    behind, first_read = _followers(use)
    end = min(use.position + SINK_WINDOW, first_read, len(step.items) - 1)
    for other in step.items[use.position + 1 : end]:
        if (
            other is not use
            and other not in behind
            and not is_view(other)
            and any(step.root(v) in wanted for v in other.op.operands)
        ):
            follower = next(i for i in step.items[other.position + 1 :] if i not in behind).op
            use.op.move_before(follower)
            last = use.op
            for item in behind:
                item.op.move_after(last)
                last = item.op
            return use.op
    return None


def _followers(use: Item) -> tuple[list[Item], int]:
    """The views and casts of a contraction's result, in order, which move with it; the position of the next reader."""
    behind: list[Item] = []
    pending, first_read = [use], 1 << 62
    while pending:
        for reader in (r for readers in pending.pop().readers for r in readers):
            if is_view(reader) or reader.name == "nova.cast":
                behind.append(reader)
                pending.append(reader)
            else:
                first_read = min(first_read, reader.position)
    return sorted(behind, key=lambda item: item.position), first_read
