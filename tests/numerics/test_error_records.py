"""Errors that a GPU's step finds: what it may still write, when the host sees them, and what is put back."""

from __future__ import annotations

import pytest
import torch

import nova
from nova.runtime import cuda, error_records, executable
from nova.runtime.step_plan import GUARDED_COPY, CopyBytes, KernelCall
from tests.numerics import runtime_kernels as kernels
from tests.numerics.device_fakes import guarded_copy, on_gpu
from tests.numerics.test_device_runtime import device  # noqa: F401  (a fixture)
from tests.numerics.test_runtime import Builder

N = 4
GOOD, BAD = torch.ones(N, dtype=torch.int64), torch.tensor([1, -7, 1, 1])
RAISES = "IndexError: {value} is out of range"


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    monkeypatch.setattr(executable, "_guarded_copy", lambda target: guarded_copy())


def counted_step() -> Builder:
    """Before the check: early <- 2 early. After it: late <- late + g, and a count on the CPU goes up."""
    b = Builder()
    b.graph.device = "cuda:0"
    early, late, g = (b.input(N, name=name) for name in ("early", "late", "g"))
    x = b.input(N, name="x", dtype="i64")
    count = b.value((), "f32", "tensor", name="count")
    b.graph.values[count].host = True
    doubled = b.call(on_gpu(kernels.add(N)), [early, early], (N,), inplace=[(0, 0), (1, 0)])
    b.output(b.call(on_gpu(kernels.checked_copy(N)), [x], (N,), "i64", raises=RAISES, source="line 3"))
    added = b.call(on_gpu(kernels.add(N)), [late, g], (N,), inplace=[(0, 0), (1, 0)])
    for call in b.graph.calls:
        call.guarded = not call.raises
    b.output(doubled, state_of=early)
    b.output(added, state_of=late)
    b.output(b.call(on_gpu(kernels.add(1)), [count, count], (), inplace=[(0, 0), (1, 0)]), state_of=count)
    b.graph.outputs[-1].counts = b.graph.calls[-1].guarded = True
    return b


def inputs():
    return [torch.full((N,), 3.0), torch.zeros(N), torch.ones(N), GOOD, torch.tensor(5.0)]


def test_state_that_is_made_before_a_check_is_copied_after_it(device):  # noqa: F811
    step = counted_step().link()
    plan = step.plan
    copies = [item for item in plan.items if isinstance(item, KernelCall) and item.symbol == GUARDED_COPY]
    assert plan.items[-1] in copies and len(copies) == 1 and copies[0].slots[1] == 1  # early
    assert not any(isinstance(item, CopyBytes) for item in plan.items)
    assert any("written once no error was found" in text for text in plan.report["copies"])
    assert plan.report["donated"] == 2  # late and the count are written in place
    state = inputs()
    step(state)
    assert state[0].tolist() == [6.0] * N and state[1].tolist() == [1.0] * N and state[4] == 6
    again = type(step).from_entry(*step.entry())
    assert again.plan == plan


def test_a_check_that_repeats_an_earlier_one_delays_nothing(device):  # noqa: F811
    b = counted_step()
    b.graph.calls.append(b.graph.calls.pop(1))  # the check comes last
    assert step_copies(b) == 3
    b.graph.calls[-1].repeats = True
    first = b.call(on_gpu(kernels.checked_copy(N)), [3], (N,), "i64", raises=RAISES)
    b.graph.calls.insert(0, b.graph.calls.pop())
    b.output(first)
    assert step_copies(b) == 0


def step_copies(b: Builder) -> int:
    items = b.link().plan.items
    return sum(item.slots[1] for item in items if isinstance(item, KernelCall) and item.symbol == GUARDED_COPY)


@pytest.mark.parametrize("late", [False, True])
def test_a_bad_step_and_those_after_it_leave_state_and_counts(device, late):  # noqa: F811
    device.driver.is_late = late
    step, state = counted_step().link(), inputs()
    step(state)
    before = [t.clone() for t in state]
    step([*state[:3], BAD, state[4]])
    if late:
        step(state)
        step(state)
        assert state[4] == 9  # the host does not know yet
        with pytest.raises(IndexError, match="-7 is out of range\n  at line 3"):
            nova.synchronize()
    else:
        with pytest.raises(IndexError, match="-7"):
            step(state)
    assert torch.equal(state[0], before[0]) and torch.equal(state[4], before[4])
    nova.synchronize()  # the record is clear
    step(state)
    nova.synchronize()
    assert torch.equal(state[0], 2 * before[0]) and state[4] == before[4] + 1


def test_the_host_waits_where_it_is_too_far_ahead(device):  # noqa: F811
    device.driver.is_late = True
    step, state = counted_step().link(), inputs()
    for _ in range(error_records.RING):
        step(state)
    assert not device.driver.called("cuEventSynchronize")
    step(state)
    assert len(device.driver.called("cuEventSynchronize")) == 1
    for _ in range(error_records.RING - 2):
        step(state)
    step([*state[:3], BAD, state[4]])
    with pytest.raises(IndexError):
        for _ in range(error_records.RING):
            step(state)
    assert state[4] == 5 + 2 * error_records.RING - 1


def test_what_was_launched_is_known_also_if_its_outputs_could_not_be_gathered(device, monkeypatch):  # noqa: F811
    b = Builder()
    b.graph.device = "cuda:0"
    x = b.input(2, N // 2, name="x", dtype="i64")
    found = b.call(on_gpu(kernels.checked_copy(N)), [x], (2, N // 2), "i64", raises=RAISES, source="line 3")
    b.output(found, strides=(1, 2))
    step = b.link()
    step([GOOD.view(2, -1)])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(step._memory, "view", lambda dense: 1 // 0)
        step([BAD.view(2, -1)])
    with pytest.raises(IndexError, match="-7"):
        nova.synchronize()


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemcpyHtoDAsync", "cuEventRecord", "cuCtxPushCurrent"])
def test_a_step_that_cannot_be_launched_counts_nothing(device, name):  # noqa: F811
    step, state = counted_step().link(), inputs()
    step(state)
    device.driver.failing[name] = 1
    with pytest.raises(cuda.CudaError):
        step(state)
    assert state[4] == 6
    with pytest.raises(ValueError, match="input g"):
        step([*state[:2], torch.ones(N + 1), *state[3:]])
    step([*state[:3], BAD, state[4]])
    with pytest.raises(IndexError):
        step(state)
    assert state[4] == 6
