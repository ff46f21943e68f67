"""The record of what fusion did and refused, for `nova.explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nova.fusion.records import Op, place


@dataclass(frozen=True)
class Decision:
    """One fusion done or refused. `op` and `with_op` are op names; `where` is the user's line of `op`."""

    kind: str  # "fused", "refused", "recomputed", "materialised", "batched"
    op: str
    with_op: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        joined = f" with {self.with_op}" if self.with_op else ""
        where = f"  [{self.where}]" if self.where else ""
        return f"{self.kind}: {self.op}{joined}: {self.reason}{where}"


class Report:
    """Decisions in program order. Source lines are only looked up when somebody asks."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Op, str, str]] = []

    def add(self, kind: str, op: Op, with_op: str, reason: str) -> None:
        self._entries.append((kind, op, with_op, reason))

    def decisions(self) -> list[Decision]:
        """All of them as plain data."""
        return list(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Decision]:
        for kind, op, other, reason in self._entries:
            yield Decision(kind, op.name, other, reason, place(op))

    def __str__(self) -> str:
        return "\n".join(map(str, self))


_collectors: list[Report] = []


@contextmanager
def collecting() -> Iterator[Report]:
    """`with collecting() as report:` - passes run inside add their decisions to `report`."""
    report = Report()
    _collectors.append(report)
    try:
        yield report
    finally:
        _collectors.remove(report)


def current() -> Report:
    """The report to add to: the innermost one being collected, or one that nobody reads."""
    return _collectors[-1] if _collectors else Report()
