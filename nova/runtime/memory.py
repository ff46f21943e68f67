"""The memory plan of a whole step: one arena, in-place reuse, donation of state.

Pure: it sees values with sizes and calls in order, never tensors or IR.

    v0 input (parameter)        call 0: v2 = f(v0, v1)        v2: arena, offset 0
    v1 input (batch)            call 1: v3 = g(v2)            v3: arena, same bytes as v2 (in place)
                                call 2: v4 = h(v0, v3)        v4: written straight into v0 (donated)

Every value has a *root* (itself, or the value it is a view of). A root lives in exactly one place: an input's
memory, a constant, a fresh output tensor, or the arena. Arena roots joined by in-place reuse form one
*slot*; slots are packed by `packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nova.runtime.packing import Interval, align, pack, peak_live_bytes

Segment = Literal["input", "constant", "output", "arena"]


@dataclass(frozen=True)
class Value:
    """`kind`: "input" (state or batch), "constant", or "temp" (made by a call). `view_of`: same bytes as that value."""

    nbytes: int
    kind: Literal["input", "constant", "temp"] = "temp"
    view_of: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Call:
    """One kernel call. `inplace` pairs (operand position, result position) may share one buffer."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...] = ()
    workspace: int = 0
    name: str = ""
    writes_state: bool = True  # its results may be written straight into the inputs that they replace


@dataclass(frozen=True)
class Output:
    """A result of the step. `state_of`: the input whose contents it replaces; None: a fresh tensor.

    `strided` outputs are gathered by the caller after the step, so they only have to live to its end.
    """

    value: int
    state_of: int | None = None
    strided: bool = False


@dataclass(frozen=True)
class Place:
    """Where a value's bytes are: `index` is the input value, the constant value or the output position."""

    segment: Segment
    index: int
    offset: int = 0


@dataclass(frozen=True)
class Copy:
    """`nbytes` from one place to another, before the first call or after the last."""

    source: Place
    target: Place
    nbytes: int
    reason: str


@dataclass
class MemoryPlan:
    """The answer: a place for every value, copies, and how good it is."""

    places: list[Place] = field(default_factory=list)
    workspaces: list[Place | None] = field(default_factory=list)
    copies_before: list[Copy] = field(default_factory=list)
    copies_after: list[Copy] = field(default_factory=list)
    arena_bytes: int = 0
    lower_bound: int = 0  # bytes live at the worst moment; no arena can be smaller
    naive_bytes: int = 0  # every temporary in its own memory
    donated: dict[int, int] = field(default_factory=dict)  # input value -> value written straight into it
    shared: list[tuple[int, int]] = field(default_factory=list)  # in-place pairs taken: (dead operand, result)
    strided: dict[int, Place] = field(default_factory=dict)  # where the dense bytes of strided outputs are
    slots: list[tuple[str, int, int, int, int]] = field(default_factory=list)  # name, first, last call, offset, bytes

    def table(self, limit: int = 20) -> str:
        """A printable summary: totals, then the largest slots."""
        lines = [
            f"arena {self.arena_bytes:,} B (lower bound {self.lower_bound:,}, without reuse {self.naive_bytes:,})",
            f"{len(self.shared)} results in place of a dead operand, {len(self.donated)} states written in place, "
            f"{len(self.copies_before) + len(self.copies_after)} copies",
        ]
        lines += [f"  copy {copy.nbytes:,} B: {copy.reason}" for copy in self.copies_before + self.copies_after]
        lines.append(f"{'buffer':<32}{'bytes':>14}{'offset':>14}{'first':>8}{'last':>8}")
        for name, start, end, offset, nbytes in sorted(self.slots, key=lambda slot: -slot[4])[:limit]:
            lines.append(f"{name[:31]:<32}{nbytes:>14,}{offset:>14,}{start:>8}{end:>8}")
        if len(self.slots) > limit:
            lines.append(f"... and {len(self.slots) - limit} smaller")
        return "\n".join(lines)

    def drawing(self) -> list[dict[str, int | str]]:
        """Rectangles for a picture: time on one axis (calls), offset on the other."""
        return [
            {"name": name, "start": start, "end": end, "offset": offset, "nbytes": nbytes}
            for name, start, end, offset, nbytes in self.slots
        ]


BEFORE = -1  # the time before the first call, when `copies_before` run


class _Planner:
    def __init__(self, values: Sequence[Value], calls: Sequence[Call], outputs: Sequence[Output]):
        self.values, self.calls, self.outputs = values, calls, outputs
        self.end = len(calls)  # the time after the last call, when `copies_after` run and outputs are read
        self.root = self._roots()
        self.plan = MemoryPlan()
        self.home: dict[int, Place] = {}  # roots outside the arena
        self.defined: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.reads: dict[int, list[int]] = {}
        self.saved: dict[int, Place] = {}  # inputs whose old contents are kept aside
        self.given: set[int] = set()  # roots whose bytes a later result took over
        self.overwritten = {
            output.state_of: self.root[output.value] for output in outputs if output.state_of is not None
        }

    def _roots(self) -> list[int]:
        roots: list[int] = []
        for index, value in enumerate(self.values):
            if value.view_of is None:
                roots.append(index)
                continue
            if not 0 <= value.view_of < index:
                raise ValueError(f"value {index} is a view of {value.view_of}, which is not defined before it")
            if self.values[value.view_of].nbytes != value.nbytes:
                raise ValueError(f"value {index} is a view of {value.view_of} but has another size")
            roots.append(roots[value.view_of])
        return roots

    def run(self) -> MemoryPlan:
        self._liveness()
        self._homes()
        self._donate()
        self._output_homes()
        self._state_copies()
        self._user_copies()
        self._pack()
        return self.plan

    # -- lifetimes

    def _liveness(self) -> None:
        for time, call in enumerate(self.calls):
            for operand in call.operands:
                root = self.root[operand]
                if self.values[root].kind == "temp" and root not in self.defined:
                    raise ValueError(f"call {time} ({call.name}) reads value {operand} before any call makes it")
                self.reads.setdefault(root, []).append(time)
                self.last[root] = time
            for result in call.results:
                if self.root[result] != result or self.values[result].kind != "temp":
                    raise ValueError(f"call {time} ({call.name}) writes value {result}, which is not its own buffer")
                if result in self.defined:
                    raise ValueError(f"value {result} is made by two calls")
                self.defined[result] = time
                self.last[result] = time
        for output in self.outputs:
            root = self.root[output.value]
            if self.values[root].kind == "temp":
                if root not in self.defined:
                    raise ValueError(f"output value {output.value} is never made")
                self.last[root] = self.end

    def _homes(self) -> None:
        for index, value in enumerate(self.values):
            if self.root[index] == index and value.kind != "temp":
                self.home[index] = Place(value.kind, index)

    # -- state: written straight into its input where every read of the old contents comes first

    def _donate(self) -> None:
        claimed: set[int] = set()
        for output in self.outputs:
            target = output.state_of
            if target is None:
                continue
            if self.values[target].kind != "input" or self.root[target] != target:
                raise ValueError(f"state is bound to value {target}, which is not an input")
            if self.values[target].nbytes != self.values[output.value].nbytes:
                raise ValueError(f"state for input {target} has another size than the input")
            root = self.root[output.value]
            if root in claimed or self.values[root].kind != "temp" or not self._may_donate(root, target):
                continue
            claimed.add(root)
            self.home[root] = Place("input", target)
            self.plan.donated[target] = root

    def _may_donate(self, root: int, target: int) -> bool:
        if self.overwritten[target] != root:  # two outputs name this input: the last one counts
            return False
        made = self.defined[root]
        if not self.calls[made].writes_state:
            return False
        if any(time > made for time in self.reads.get(target, ())):
            return False
        return made not in self.reads.get(target, ()) or self._inplace_legal(self.calls[made], target, root)

    def _inplace_legal(self, call: Call, operand_root: int, result: int) -> bool:
        """Every position at which the call reads the operand's bytes may share with the result."""
        position = call.results.index(result)
        places = [i for i, operand in enumerate(call.operands) if self.root[operand] == operand_root]
        return bool(places) and all((i, position) in call.inplace for i in places)

    def _output_homes(self) -> None:
        """A fresh output is written by its call; a value that two outputs want lives in the first."""
        for position, output in enumerate(self.outputs):
            root = self.root[output.value]
            if output.state_of is None and not output.strided and root not in self.home:
                self.home[root] = Place("output", position)

    def _place_of(self, root: int) -> Place:
        """A root's place; roots in the arena get their offset later, keyed by index."""
        return self.home.get(root, Place("arena", root))

    def _state_copies(self) -> None:
        for output in self.outputs:
            target, root = output.state_of, self.root[output.value]
            if target is None or self.overwritten[target] != root or self.plan.donated.get(target) == root:
                continue
            if root == target:
                continue  # the step leaves this state as it is
            name = self.values[target].name or f"input {target}"
            source = self._place_of(root)
            if self.values[root].kind == "input" and root in self.overwritten and self.overwritten[root] != root:
                source = self._save(root)  # its old contents are replaced too: two states swap
            self.plan.copies_after.append(
                Copy(source, Place("input", target), self.values[root].nbytes, f"new {name}, {self._why(root, target)}")
            )

    def _why(self, root: int, target: int) -> str:
        if self.values[root].kind != "temp":
            return f"which is another {self.values[root].kind}"
        if root in self.plan.donated.values():
            return "which is also another state"
        if not self.calls[self.defined[root]].writes_state:
            return "written once no error was found"
        return "made while the old one is still read"

    def _save(self, root: int) -> Place:
        """A copy of an input's old contents, taken before the first call."""
        if root not in self.saved:
            self.saved[root] = Place("arena", -1 - root)
            self.plan.copies_before.append(
                Copy(Place("input", root), self.saved[root], self.values[root].nbytes, f"old {self.values[root].name}")
            )
        return self.saved[root]

    def _user_copies(self) -> None:
        for position, output in enumerate(self.outputs):
            root = self.root[output.value]
            if output.state_of is not None:
                continue
            place = self._place_of(root)
            replaced = self.values[root].kind == "input" and self.overwritten.get(root, root) != root
            if output.strided:
                self.plan.strided[position] = self._save(root) if replaced else place
                continue
            if place == Place("output", position):
                continue
            copy = Copy(place, Place("output", position), self.values[root].nbytes, f"output {position}")
            (self.plan.copies_before if replaced else self.plan.copies_after).append(copy)

    # -- the arena

    def _pack(self) -> None:
        slot_of: dict[int, int] = {}
        slots: list[Interval] = []
        names: list[str] = []
        arena_roots = sorted((r for r in self.defined if r not in self.home), key=lambda r: self.defined[r])
        for root in arena_roots:
            made, last, nbytes = self.defined[root], self.last[root], self.values[root].nbytes
            reuse = self._reusable(root, slot_of)
            if reuse is not None:
                slot = slot_of[root] = slot_of[reuse]
                slots[slot] = Interval(slots[slot].nbytes, slots[slot].start, last)
                self.plan.shared.append((reuse, root))
                self.given.add(reuse)
            else:
                slot_of[root] = len(slots)
                slots.append(Interval(nbytes, made, last))
                names.append(self.values[root].name or self.calls[made].name or f"v{root}")
        for root, place in self.saved.items():
            slot_of[place.index] = len(slots)
            slots.append(Interval(self.values[root].nbytes, BEFORE, self.end))
            names.append(f"old {self.values[root].name}")
        work: dict[int, int] = {}
        for time, call in enumerate(self.calls):
            if call.workspace:
                work[time] = len(slots)
                slots.append(Interval(call.workspace, time, time))
                names.append(f"workspace of {call.name}")
        offsets, total = pack(slots)
        plan = self.plan
        plan.arena_bytes, plan.lower_bound = total, peak_live_bytes(slots)
        plan.naive_bytes = sum(align(self.values[r].nbytes) for r in arena_roots)
        plan.naive_bytes += sum(align(slots[i].nbytes) for i in work.values())
        plan.naive_bytes += sum(align(self.values[r].nbytes) for r in self.saved)
        plan.slots = [
            (name, slot.start, slot.end, offset, slot.nbytes)
            for name, slot, offset in zip(names, slots, offsets, strict=True)
        ]

        def final(place: Place) -> Place:
            if place.segment != "arena":
                return place
            return Place("arena", 0, offsets[slot_of[place.index]])

        plan.places = [final(self._place_of(self.root[i])) if self._exists(i) else Place("arena", 0, 0)
                       for i in range(len(self.values))]  # fmt: skip
        plan.workspaces = [Place("arena", 0, offsets[work[t]]) if t in work else None for t in range(len(self.calls))]
        plan.strided = {position: final(place) for position, place in plan.strided.items()}
        for copies in (plan.copies_before, plan.copies_after):
            copies[:] = [Copy(final(c.source), final(c.target), c.nbytes, c.reason) for c in copies if c.nbytes]

    def _exists(self, value: int) -> bool:
        return self.root[value] in self.home or self.root[value] in self.defined

    def _reusable(self, result: int, slot_of: dict[int, int]) -> int | None:
        """An operand that dies in the call that makes `result` and may give it its bytes."""
        made = self.defined[result]
        call = self.calls[made]
        position = call.results.index(result)
        size = align(self.values[result].nbytes)
        for operand, target in call.inplace:
            if target != position:
                continue
            root = self.root[call.operands[operand]]
            if root not in slot_of or self.last[root] != made or align(self.values[root].nbytes) != size:
                continue
            if root not in self.given and self._inplace_legal(call, root, result):
                return root
        return None


def plan(values: Sequence[Value], calls: Sequence[Call], outputs: Sequence[Output]) -> MemoryPlan:
    """Plans the memory of a step. Raises ValueError where the step itself is malformed."""
    return _Planner(values, calls, outputs).run()


def peak_of(values: Sequence[Value], calls: Sequence[Call], outputs: Sequence[Output]) -> int:
    """Arena bytes live at the worst moment of this order (a lower bound, without packing)."""
    return plan(values, calls, outputs).lower_bound


def reorder(values: Sequence[Value], calls: Sequence[Call], outputs: Sequence[Output]) -> list[int]:
    """An order of the calls with a lower peak, or program order where greedy finds none.

    Greedy: of the calls whose operands exist, the one that adds the fewest bytes goes first. Call it only for
    calls without side effects; `plan` works for any order of pure calls.
    """
    root: list[int] = []
    for index, value in enumerate(values):
        root.append(index if value.view_of is None else root[value.view_of])
    maker = {result: time for time, call in enumerate(calls) for result in call.results}
    readers: dict[int, set[int]] = {}
    waiting: list[set[int]] = []
    for time, call in enumerate(calls):
        reads = {root[operand] for operand in call.operands}
        waiting.append({maker[r] for r in reads if r in maker})
        for r in reads:
            readers.setdefault(r, set()).add(time)
    kept = {root[output.value] for output in outputs}

    def added(time: int) -> int:
        made = sum(align(values[result].nbytes) for result in calls[time].results)
        reads = {root[operand] for operand in calls[time].operands}
        freed = sum(align(values[r].nbytes) for r in reads if r in maker and r not in kept and readers[r] == {time})
        return made - freed

    order: list[int] = []
    ready = {time for time, needs in enumerate(waiting) if not needs}
    while ready:
        time = min(ready, key=lambda t: (added(t), t))
        ready.remove(time)
        order.append(time)
        for r in {root[operand] for operand in calls[time].operands}:
            readers[r].discard(time)
        for later, needs in enumerate(waiting):
            if time in needs:
                needs.remove(time)
                if not needs:
                    ready.add(later)
    if len(order) != len(calls):
        raise ValueError("the calls depend on each other in a circle")
    program = list(range(len(calls)))
    better = peak_of(values, [calls[t] for t in order], outputs) < peak_of(values, calls, outputs)
    return order if better else program
