"""Measured time of every kernel call of a compiled step, on copies of its inputs.

The step runs call by call, in order, on the memory that the plan gives it, so caches are as warm or cold as in a real
step. Only the fork-join of the step program's own code is missing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from nova.runtime import step_program
from nova.runtime.executable import Executable
from nova.runtime.step_plan import KernelCall


@dataclass
class KernelTime:
    """Seconds of one kernel, summed over its calls in a step; one entry a repetition."""

    name: str
    calls: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)


def profile(
    executable: Executable,
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    seed: int = 0,
    repeats: int = 7,
) -> list[KernelTime]:
    """Times each kernel; longest first. `inputs` stay as they are."""
    copies = [t.detach().clone() for t in inputs]
    executable(copies, scalars, seed)  # binds every pointer
    if executable.plan.device != "cpu":
        return _on_device(executable, copies, repeats)
    plan, table = executable.plan, executable.pointer_table
    slots = step_program.layout(plan).first_slot
    functions = [
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library[kernel.entry])
        for kernel, library in zip(executable.kernels, executable.libraries, strict=True)
    ]
    outputs = executable.allocate_outputs()
    table.run(copies, outputs)
    address = ctypes.addressof(table.table)
    times: dict[int, KernelTime] = {}
    for repeat in range(repeats):
        spent: dict[int, float] = {}
        for slot, item in zip(slots, plan.items, strict=True):
            if isinstance(item, KernelCall):
                start = time.perf_counter()
                functions[item.kernel](address + 8 * slot)
                spent[item.kernel] = spent.get(item.kernel, 0.0) + time.perf_counter() - start
                if repeat == 0:
                    times.setdefault(item.kernel, KernelTime(item.symbol)).calls += 1
        for kernel, seconds in spent.items():
            times[kernel].seconds.append(seconds)
    return sorted(times.values(), key=lambda t: -t.median)


def _on_device(executable: Any, inputs: Sequence[torch.Tensor], repeats: int) -> list[KernelTime]:
    """The same on a GPU, by events around every call, with the host ahead of the GPU."""
    plan, device = executable.plan, executable._device
    table = executable.pointer_table
    slots = step_program.layout(plan).first_slot
    functions = [
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library[kernel.entry])
        for kernel, library in zip(executable.kernels, executable.libraries, strict=True)
    ]
    address = ctypes.addressof(table.table)
    calls = [(item, slot) for slot, item in zip(slots, plan.items, strict=True) if isinstance(item, KernelCall)]
    outputs = executable.allocate_outputs()  # alive until the end: the table points at them
    with device.lock, device.context():
        device.stream.value = device.current_stream()
        table.run(inputs, outputs)
    times: dict[int, KernelTime] = {}
    for repeat in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * len(calls))]
        with device.lock, device.context():
            device.stream.value = device.current_stream()
            torch.cuda._sleep(20_000_000)
            for (item, slot), start, end in zip(calls, events[::2], events[1::2], strict=True):
                if item.table:
                    words = 8 * (len(item.slots) - 1)
                    device.driver.call(
                        "cuMemcpyHtoDAsync", table.table[slot], address + 8 * slot + 8, words, device.stream.value
                    )
                start.record()
                functions[item.kernel](address + 8 * slot)
                end.record()
        torch.cuda.synchronize(executable._torch_device)
        spent: dict[int, float] = {}
        for (item, _), start, end in zip(calls, events[::2], events[1::2], strict=True):
            spent[item.kernel] = spent.get(item.kernel, 0.0) + start.elapsed_time(end) * 1e-3
            if repeat == 0:
                times.setdefault(item.kernel, KernelTime(item.symbol)).calls += 1
        for kernel, seconds in spent.items():
            times[kernel].seconds.append(seconds)
    return sorted(times.values(), key=lambda t: -t.median)
