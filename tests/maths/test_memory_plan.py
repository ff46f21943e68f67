"""The memory planner: no two live buffers overlap, sharing only where legal, and the step still computes the same.

The main property is executable: a random step is run twice on symbolic bytes, once with every value in its own
memory and once in the memory that the plan assigns; results and states must agree.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nova.runtime import memory
from nova.runtime.memory import Call, Output, Place, Value
from nova.runtime.packing import ALIGNMENT, Interval, align, pack, peak_live_bytes


@st.composite
def intervals(draw):
    count = draw(st.integers(0, 25))
    made = []
    for _ in range(count):
        start = draw(st.integers(0, 20))
        made.append(Interval(draw(st.integers(0, 1000)), start, start + draw(st.integers(0, 10))))
    return made


@given(intervals())
@settings(max_examples=200, deadline=None)
def test_packing_never_overlaps_live_buffers(buffers):
    offsets, total = pack(buffers)
    for i, a in enumerate(buffers):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + align(a.nbytes) <= total or a.nbytes == 0
        for j in range(i):
            b = buffers[j]
            if a.overlaps(b) and a.nbytes and b.nbytes:
                assert offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]
    assert peak_live_bytes(buffers) <= total <= sum(align(b.nbytes) for b in buffers)


def test_packing_reaches_the_bound_on_a_chain():
    chain = [Interval(1000, i, i + 1) for i in range(50)]
    assert pack(chain)[1] == peak_live_bytes(chain) == 2 * align(1000)


@st.composite
def steps(draw):
    """A random step: inputs, constants, kernels with in-place pairs, views, state and user outputs."""
    sizes = [64, 256, 300]
    values = [Value(draw(st.sampled_from(sizes)), "input", name=f"in{i}") for i in range(draw(st.integers(1, 5)))]
    inputs = list(range(len(values)))
    if draw(st.booleans()):
        values.append(Value(draw(st.sampled_from(sizes)), "constant", name="const"))
    calls = []
    for _ in range(draw(st.integers(0, 12))):
        operands = tuple(draw(st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=3)))
        results = []
        for _ in range(draw(st.integers(1, 2))):
            results.append(len(values))
            values.append(Value(draw(st.sampled_from(sizes))))
        pairs = [(i, j) for i in range(len(operands)) for j in range(len(results))
                 if values[operands[i]].nbytes == values[results[j]].nbytes]  # fmt: skip
        inplace = tuple(p for p in pairs if draw(st.booleans()))
        calls.append(Call(operands, tuple(results), inplace, draw(st.sampled_from([0, 0, 128])), f"k{len(calls)}"))
        if draw(st.booleans()):
            of = draw(st.sampled_from(range(len(values))))
            values.append(Value(values[of].nbytes, values[of].kind, of))
    outputs = []
    for target in inputs:
        same = [i for i, value in enumerate(values) if value.nbytes == values[target].nbytes]
        if draw(st.booleans()):
            outputs.append(Output(draw(st.sampled_from(same)), target))
    for _ in range(draw(st.integers(0, 3))):
        outputs.append(Output(draw(st.sampled_from(range(len(values)))), None, draw(st.booleans())))
    return values, calls, outputs


def run_unplanned(values, calls, outputs):
    """What each output should be: a term over the inputs' initial contents."""
    content = {i: ("old", i) for i, value in enumerate(values) if value.kind != "temp" and value.view_of is None}
    root = []
    for i, value in enumerate(values):
        root.append(i if value.view_of is None else root[value.view_of])
    for time, call in enumerate(calls):
        reads = tuple(content[root[o]] for o in call.operands)
        for j, result in enumerate(call.results):
            content[result] = ("call", time, j, reads)
    return [content[root[o.value]] for o in outputs], root


class Memory:
    """Bytes as symbols: a write of a range invalidates every other term that overlaps it."""

    def __init__(self):
        self.ranges: dict[tuple, list[tuple[int, int, object]]] = {}

    @staticmethod
    def space(place: Place):
        return ("arena",) if place.segment == "arena" else (place.segment, place.index)

    def write(self, place: Place, nbytes: int, term):
        low, high = place.offset, place.offset + nbytes
        kept = [r for r in self.ranges.get(self.space(place), []) if r[1] <= low or r[0] >= high]
        self.ranges[self.space(place)] = [*kept, (low, high, term)]

    def read(self, place: Place, nbytes: int):
        for low, high, term in self.ranges.get(self.space(place), []):
            if low == place.offset and high == place.offset + nbytes:
                return term
        return "garbage"


def run_planned(values, calls, outputs, plan):
    memory_ = Memory()
    for i, value in enumerate(values):
        if value.kind != "temp" and value.view_of is None:
            memory_.write(Place(value.kind, i), value.nbytes, ("old", i))
    for copy in plan.copies_before:
        memory_.write(copy.target, copy.nbytes, memory_.read(copy.source, copy.nbytes))
    for time, call in enumerate(calls):
        reads = tuple(memory_.read(plan.places[o], values[o].nbytes) for o in call.operands)
        # a kernel may write a result before it has read an operand that is not declared in place with it
        for position, operand in enumerate(call.operands):
            for j, result in enumerate(call.results):
                a, b = plan.places[operand], plan.places[result]
                if Memory.space(a) == Memory.space(b) and values[operand].nbytes and values[result].nbytes:
                    disjoint = (a.offset + values[operand].nbytes <= b.offset
                                or b.offset + values[result].nbytes <= a.offset)  # fmt: skip
                    assert disjoint or (a == b and (position, j) in call.inplace)
        if plan.workspaces[time] is not None:
            memory_.write(plan.workspaces[time], call.workspace, "workspace")
        for j, result in enumerate(call.results):
            memory_.write(plan.places[result], values[result].nbytes, ("call", time, j, reads))
        for result in call.results:  # results of one call, and its workspace, never overlap
            assert memory_.read(plan.places[result], values[result].nbytes) != "garbage"
    for copy in plan.copies_after:
        memory_.write(copy.target, copy.nbytes, memory_.read(copy.source, copy.nbytes))
    found = []
    for position, output in enumerate(outputs):
        if output.state_of is not None:
            place = Place("input", output.state_of)
        else:
            place = plan.strided.get(position, Place("output", position))
        found.append(memory_.read(place, values[output.value].nbytes))
    untouched = {i for i, value in enumerate(values) if value.kind == "input" and value.view_of is None}
    untouched -= {o.state_of for o in outputs}
    for i in untouched:  # inputs that are not state keep their contents
        assert memory_.read(Place("input", i), values[i].nbytes) == ("old", i)
    return found


@given(steps())
@settings(max_examples=250, deadline=None)
def test_planned_step_computes_what_the_step_says(step):
    values, calls, outputs = step
    plan = memory.plan(values, calls, outputs)
    expected, _ = run_unplanned(values, calls, outputs)
    assert run_planned(values, calls, outputs, plan) == expected
    assert plan.lower_bound <= plan.arena_bytes <= plan.naive_bytes
    for place in plan.places:
        assert place.offset % ALIGNMENT == 0
    assert plan.table() and len(plan.drawing()) == len(plan.slots)


@given(steps())
@settings(max_examples=100, deadline=None)
def test_reordered_calls_compute_the_same_with_no_higher_peak(step):
    values, calls, outputs = step
    order = memory.reorder(values, calls, outputs)
    assert sorted(order) == list(range(len(calls)))
    moved = [calls[t] for t in order]
    plan = memory.plan(values, moved, outputs)
    assert plan.lower_bound <= memory.plan(values, calls, outputs).lower_bound
    expected, _ = run_unplanned(values, moved, outputs)
    assert run_planned(values, moved, outputs, plan) == expected


def test_optimizer_update_is_written_into_the_parameter():
    values = [Value(256, "input", name="p"), Value(256, "input", name="g"), Value(256)]
    plan = memory.plan(values, [Call((0, 1), (2,), ((0, 0),))], [Output(2, 0)])
    assert plan.donated == {0: 2} and plan.places[2] == Place("input", 0)
    assert plan.arena_bytes == 0 and not plan.copies_after


def test_state_still_read_later_is_copied_at_the_end():
    values = [Value(256, "input", name="p"), Value(256), Value(256)]
    calls = [Call((0,), (1,), ((0, 0),)), Call((0, 1), (2,))]
    plan = memory.plan(values, calls, [Output(1, 0), Output(2)])
    assert not plan.donated and [copy.target for copy in plan.copies_after] == [Place("input", 0)]
    assert plan.places[2] == Place("output", 1)


def test_operand_read_twice_is_in_place_only_if_both_positions_allow_it():
    values = [Value(256, "input"), Value(256), Value(256)]
    calls = [Call((0,), (1,)), Call((1, 1), (2,), ((0, 0),))]
    strict = memory.plan(values, calls, [Output(2, None, True)])
    assert not strict.shared and strict.arena_bytes == 512
    relaxed = memory.plan(values, [calls[0], Call((1, 1), (2,), ((0, 0), (1, 0)))], [Output(2, None, True)])
    assert relaxed.shared == [(1, 2)] and relaxed.arena_bytes == 256


def test_two_states_swap():
    values = [Value(64, "input", name="a"), Value(64, "input", name="b")]
    outputs = [Output(1, 0), Output(0, 1)]
    plan = memory.plan(values, [], outputs)
    assert run_planned(values, [], outputs, plan) == [("old", 1), ("old", 0)]


def test_old_state_returned_to_the_user_is_saved_first():
    values = [Value(64, "input", name="p"), Value(64)]
    outputs = [Output(1, 0), Output(0)]
    calls = [Call((0,), (1,), ((0, 0),))]
    plan = memory.plan(values, calls, outputs)
    assert plan.donated == {0: 1} and len(plan.copies_before) == 1
    assert run_planned(values, calls, outputs, plan)[1] == ("old", 0)


def test_malformed_steps_are_refused():
    with pytest.raises(ValueError, match="before any call makes it"):
        memory.plan([Value(64), Value(64)], [Call((0,), (1,))], [])
    with pytest.raises(ValueError, match="another size"):
        memory.plan([Value(64, "input"), Value(128)], [Call((0,), (1,))], [Output(1, 0)])
    with pytest.raises(ValueError, match="two calls"):
        memory.plan([Value(64, "input"), Value(64)], [Call((0,), (1,)), Call((0,), (1,))], [])


def test_plan_of_a_deep_step_is_quick_and_tight():
    """A 48-layer step shape: forward activations live until the backward reads them in reverse."""
    values = [Value(4096, "input", name="x")]
    calls, saved, last = [], [], 0
    for _ in range(48):
        for _ in range(6):
            values.append(Value(4096))
            calls.append(Call((last,), (len(values) - 1,)))
            last = len(values) - 1
            saved.append(last)
    for activation in reversed(saved):
        values.append(Value(4096))
        calls.append(Call((last, activation), (len(values) - 1,), ((0, 0),)))
        last = len(values) - 1
    plan = memory.plan(values, calls, [Output(last)])
    assert plan.arena_bytes <= plan.lower_bound * 1.02
