"""Whole training steps on the warp simulator: every kernel as per-thread code, launched by the real step program.

The device is the fake of tests/numerics/device_fakes.py; a launch runs the level-5 kernel on NumPy, on the addresses that
the launcher passed. So argument order, tables of pointers, workspaces, scalars and error records are those of a GPU.
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np
import pytest
import torch

import nova
from nova import mlir, pipeline
from nova.gpu import compile, launcher, simulate
from nova.runtime import executable, orc
from tests import models
from tests.numerics.device_fakes import FakeDevice, FakeDriver, FakeExecutable, pretend_gpu


class SimulatedDriver(FakeDriver):
    """Launches run on the simulator; `kernels` maps handles to (level-5 text, symbol)."""

    def __init__(self):
        super().__init__()
        self.allocations: list[tuple[int, int]] = []  # (start, end) of everything a kernel may touch
        self.ordered = True  # False: threads that find bad values may write over each other's

    def _cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        text, symbol = self.kernels[function]
        words = (ctypes.c_void_p * 5).from_address(extra)
        count = ctypes.c_size_t.from_address(words[3]).value // 8
        slots = list((ctypes.c_uint64 * count).from_address(words[1]))
        start, end = self._home(slots[0])
        table = count == 1 and end - start >= 8
        pointed = self._words(slots[0]) if table else []
        pointed.append(self.flag)
        known = sorted({a for a in (*slots, *pointed) if self._home(a)[1]})
        arrays = {a: self._array(a, known) for a in known}
        buffers = [arrays.get(a) for a in slots]
        memory = [arrays[a] for a in pointed if a in arrays]
        simulate.run(text, buffers, kernels=[symbol], memory=memory, ordered=self.ordered)

    def _words(self, address):
        """The addresses among the words of a table: it ends where its kernel's slots end."""
        end = self.tables[address]
        return list((ctypes.c_uint64 * ((end - address) // 8)).from_address(address))

    def _home(self, address):
        return next(((s, e) for s, e in self.allocations if s <= address < e), (0, 0))

    def _array(self, address, known):
        """From an address to the next one that is passed too, or to the end of its allocation."""
        after = bisect.bisect_right(known, address)
        end = self._home(address)[1]
        if after < len(known):
            end = min(end, known[after])
        return np.ctypeslib.as_array((ctypes.c_uint8 * (end - address)).from_address(address))


class SimulatedDevice(FakeDevice):
    def __init__(self):
        super().__init__()
        self.driver = SimulatedDriver()

    def load(self, ptx, cubin, what):
        device = self

        class Module:
            def function(self, symbol, shared):
                handle = 1000 + len(device.driver.kernels)
                device.driver.kernels[handle] = (cubin.decode(), symbol)
                return handle

        return Module()


class SimulatedExecutable(FakeExecutable):
    def __call__(self, inputs, scalars=(), seed=0):
        driver = self._device.driver
        plan = self.plan
        if self._arena is None:
            self._other_arena().busy.release()
        block = self.pointer_table.base(plan.scalar_block)
        driver.tables = {
            block + item.slots[0].offset: block + item.slots[0].offset + 8 * (len(item.slots) - 1)
            for item in plan.items if getattr(item, "table", False)
        }  # fmt: skip
        records = self._found.tensor
        driver.flag = records.data_ptr()  # the step's, to which the records of its calls point
        tensors = [*inputs, self._constants, records, self._block, self._arena.tensor]
        driver.allocations = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes]
        return super().__call__(inputs, scalars, seed)

    def allocate_outputs(self):
        made = super().allocate_outputs()
        self._device.driver.allocations += [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in made if t.nbytes]
        return made


def build(text, chosen):
    """A kernel with its level-5 text where the machine code would be."""
    *_, (_, module) = pipeline.lower_kernel(text, chosen)
    with mlir.context():
        launches, workspace = compile.launches_of(module)
    name = compile.kernel_name(mlir.parse(text))
    host = launcher.host_ir(name, launches)
    return compile.GpuKernel(
        name,
        name,
        orc.compile_ir(host, 0),
        workspace,
        host,
        "",
        str(module).encode(),
        tuple(launches),
        ({},) * len(launches),
    )


@pytest.fixture
def simulated(monkeypatch):
    device = SimulatedDevice()
    monkeypatch.setattr(FakeExecutable, "device", device)
    monkeypatch.setattr(executable, "class_for", lambda plan: SimulatedExecutable)
    pretend_gpu(monkeypatch, build)
    return device


SIZES = {
    "mlp": dict(batch=4, width=8, depth=2),
    "gan": dict(batch=3, noise=2, width=5),
    "gpt2": dict(batch=1, length=5, vocab=11, width=16, heads=2, layers=1),
    "lstm": dict(batch=2, length=3, vocab=7, width=4),
    "convnet": dict(batch=1, size=6),
    "llama": dict(batch=1, length=5, vocab=11, width=16, heads=2, kv_heads=1, layers=1),
    "bert": dict(batch=1, length=5, vocab=11, width=16, heads=2, layers=1),
}
SLOW = {"lstm", "convnet", "llama", "bert", "gan"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.lengthy] if n in SLOW else []) for n in SIZES])
def test_training(simulated, name):
    results = []
    for transform in (lambda f: f, nova.jit):
        torch.manual_seed(0)
        case = models.build(name, steps=2, **SIZES[name])
        step = transform(case.step)
        losses = [step(*batch) for batch in case.batches]
        results.append((losses, case.state()))
    (eager, eager_state), (compiled, state) = results
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    for key, value in eager_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4, msg=lambda m: f"{key}: {m}")
    assert simulated.driver.called("cuLaunchKernel")


def test_a_kernel_that_another_step_named_otherwise(simulated):
    """A step takes a kernel from the cache under the name that its first user gave it, which is that of another one here:
    both launch one block of equal width, so only their device code differs."""
    first = nova.jit(lambda *t: torch.cat([x[None] for x in t]))
    both = nova.jit(lambda a, b: (torch.cat([x[None] for x in a]), torch.cat([x[None] for x in b])))
    narrow, wide = ([torch.randn(3, width) for _ in range(7)] for width in (20, 24))
    for _ in range(2):
        assert torch.equal(first(*narrow), torch.stack(narrow))
    for _ in range(2):
        a, b = both(wide, narrow)
    assert torch.equal(a, torch.stack(wide)) and torch.equal(b, torch.stack(narrow))
