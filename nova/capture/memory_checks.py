"""The part of a binding's check that looks at memory which inputs share: see `fastpath.py` and `memory.py`."""

from __future__ import annotations

from typing import Any

from nova.capture.guards import GuardSet
from nova.capture.memory import ApartFrom, covers, distance, overlap, span_of
from nova.capture.signature import Source


class MemoryChecks:
    """Where inputs may lie. `objs` and `live_tensors` are a binding's tensors, `live` the nodes of the latter."""

    guards: GuardSet
    objs: list[Any]
    constants: list[Any]
    live: list[int]
    live_tensors: list[Any]
    space: dict[str, Any]

    def _node_at(self, source: Source) -> int:
        raise NotImplementedError

    def _emit(self, line: str) -> None:
        raise NotImplementedError

    def _memory(self) -> None:
        """Where the inputs may lie: checked on every call for those that come anew, for the others when one moved."""
        live = {index: position for position, index in enumerate(self.live)}
        regions = [(None if r[0].root == "const" else self._node_at(r[0]), r) for r in self.guards.memory]
        pairs = [
            (self._node_at(source), self._node_at(group[0][0]), offset)
            for group in self.guards.aliases
            for source, offset in group[1:]
        ]
        self._stable_regions = [(index, region) for index, region in regions if index not in live]
        self._live_regions = [
            (live[index], region, region[1] == 0 and region[2] == self.objs[index].nbytes)
            for index, region in regions
            if index in live
        ]
        self._live_changes = len(self._live_regions) > 1 and any(region[3] for _, region, _ in self._live_regions)
        self._stable_pairs = [pair for pair in pairs if pair[0] not in live and pair[1] not in live]
        self._live_pairs = [pair for pair in pairs if pair[0] in live or pair[1] in live]
        self._live_position = live
        if not self._memory_as_before():
            raise ValueError("inputs share memory in another way than the guards say")
        if self._live_pairs or (self._live_regions and any(region[3] for _, region in regions)):
            self.space["memory_check"] = self._live_memory_as_before
            self._emit("if not memory_check(): return None")

    def _memory_as_before(self) -> bool:
        """Whether the stable tensors lie where they may; remembers where that is."""
        spans = []
        for index, region in self._stable_regions:
            tensor = self.constants[int(region[0].key)] if index is None else self.objs[index]
            if not covers(tensor, region):
                return False
            spans.append(span_of(tensor, region))
        if overlap(spans) is not None:
            return False
        if any(distance(self.objs[a], self.objs[b]) != apart for a, b, apart in self._stable_pairs):
            return False
        self._apart = ApartFrom(spans)
        return True

    def _live_memory_as_before(self) -> bool:
        live, holds = self.live_tensors, self._apart.holds
        spans = []
        for position, region, whole in self._live_regions:
            span = span_of(live[position], region)
            if not holds(*span) or not (whole or covers(live[position], region)):
                return False
            spans.append(span)
        if self._live_changes and overlap(spans) is not None:
            return False
        return all(distance(self._tensor(a), self._tensor(b)) == apart for a, b, apart in self._live_pairs)

    def _tensor(self, index: int) -> Any:
        position = self._live_position.get(index)
        return self.objs[index] if position is None else self.live_tensors[position]
