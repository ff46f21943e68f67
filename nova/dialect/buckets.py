"""Gradient buckets of data parallelism (paper 3.2): which are reduced together, and when each is ready.

Gradients are packed in the order in which the backward pass produces them, up to 25 MB a bucket, one dtype each. The
marker of bucket k goes right behind the op that produces its last gradient, so that its reduction overlaps the rest of
the backward:

    %dw2 = nova.matmul ..                 %dw2 = nova.matmul ..
    %db2 = nova.reduce_sum ..      =>     %db2 = nova.reduce_sum ..
    %dx  = nova.matmul ..                 nova.bucket_ready {bucket = 0}
    %dw1 = nova.matmul ..                 %dx  = nova.matmul ..
                                          %dw1 = nova.matmul ..
                                          nova.bucket_ready {bucket = 1}

Planning is pure: it sees names, sizes and positions. `insert_markers` puts the plan into a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nova.dialect.build import Builder
from nova.dialect.types import BYTES
from nova.mlir import context, ir

DEFAULT_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class Gradient:
    """One gradient: the parameter's name, its size, and the position of the op that produces it."""

    name: str
    elements: int
    dtype: str
    position: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.elements * BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced in one piece, and the position of the op after which all of them are there."""

    gradients: tuple[Gradient, ...]

    @property
    def bytes(self) -> int:
        """Size of the packed buffer."""
        return sum(g.bytes for g in self.gradients)

    @property
    def ready_after(self) -> int:
        """Position of the op that produces the last gradient."""
        return max(g.position for g in self.gradients)

    def offsets(self) -> list[int]:
        """First element of each gradient in the packed buffer."""
        offsets, total = [], 0
        for gradient in self.gradients:
            offsets.append(total)
            total += gradient.elements
        return offsets


def plan_buckets(gradients: Sequence[Gradient], limit: int = DEFAULT_BYTES, first: int | None = None) -> list[Bucket]:
    """Buckets in the order in which they become ready.

    A bucket closes when the next gradient of its dtype would take it over `limit` bytes; one gradient larger than that
    is a bucket of its own. `first` is a smaller limit for the first bucket, whose reduction can then start early.
    """
    if limit <= 0:
        raise ValueError(f"a bucket needs a positive size, not {limit} bytes")
    open_buckets: dict[str, list[Gradient]] = {}
    sizes: dict[str, int] = {}
    closed: list[Bucket] = []
    for gradient in sorted(gradients, key=lambda g: g.position):
        pending = open_buckets.setdefault(gradient.dtype, [])
        size = sizes.get(gradient.dtype, 0)
        bound = first if first is not None and not closed else limit
        if pending and size + gradient.bytes > bound:
            closed.append(Bucket(tuple(pending)))
            pending, size = [], 0
            open_buckets[gradient.dtype] = pending
        pending.append(gradient)
        sizes[gradient.dtype] = size + gradient.bytes
    closed += [Bucket(tuple(pending)) for pending in open_buckets.values() if pending]
    return sorted(closed, key=lambda bucket: bucket.ready_after)


def insert_markers(block: ir.Block, buckets: Sequence[Bucket]) -> None:
    """Puts nova.bucket_ready {bucket = k} right behind the op at `buckets[k].ready_after` of the block."""
    with context(), ir.Location.unknown():
        ops = list(block.operations)
        for number, bucket in enumerate(buckets):
            after = bucket.ready_after
            if not 0 <= after < len(ops) - 1:
                raise ValueError(f"bucket {number} is ready after op {after} of {len(ops)}")
            builder = Builder(ir.InsertionPoint(ops[after + 1].operation))
            builder.create("bucket_ready", [], [], bucket=number)
