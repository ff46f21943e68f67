"""A GPU that is the CPU: the driver's functions as ctypes callbacks, kernels compiled for the CPU behind real launchers.

Everything that a step does on a device runs for real (launchers, step program, scalars, errors, events), except
that a launch calls a CPU kernel at once, with the parameter buffer that the launcher gave.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from nova import pipeline
from nova.capture import session
from nova.cpu.compile import KernelObject
from nova.gpu import launcher
from nova.gpu.compile import GpuKernel
from nova.gpu.launcher import Launch
from nova.runtime import cuda, orc, placement, pool
from nova.runtime.cache import Cache
from nova.runtime.device_executable import DeviceExecutable
from nova.schedule import target

_I, _P = ctypes.c_int, ctypes.c_void_p
_SIGNATURES = {
    "cuLaunchKernel": [_P, *[ctypes.c_uint] * 7, _P, _P, _P], "cuLaunchKernelEx": [_P, _P, _P, _P],
    "cuMemcpyHtoDAsync": [_P, _P, ctypes.c_size_t, _P], "cuMemcpyDtoDAsync": [_P, _P, ctypes.c_size_t, _P],
    "cuMemcpyDtoHAsync": [_P, _P, ctypes.c_size_t, _P],
    "cuCtxPushCurrent": [_P], "cuCtxPopCurrent": [_P], "cuEventRecord": [_P, _P], "cuEventSynchronize": [_P],
    "cuEventDestroy": [_P], "cuStreamSynchronize": [_P], "cuStreamWaitEvent": [_P, _P, _I], "cuMemFreeHost": [_P],
}  # fmt: skip


class FakeDriver(cuda.Driver):
    """Records every call in `log`. `failing`: name of a function -> CUresult that its next call gives."""

    def __init__(self):
        self.log: list[tuple[str, tuple]] = []
        self.failing: dict[str, int] = {}
        self.is_late = False  # copies to the host arrive when somebody waits
        self._under_way: list[tuple[int, bytes]] = []
        self.raised: BaseException | None = None
        self.kernels: dict[int, tuple[Any, bool]] = {}  # CUfunction -> (CPU entry, whether its parameter is a table)
        self._functions = {name: self._make(name, types) for name, types in _SIGNATURES.items()}

    def _make(self, name, types):
        def run(*args):
            self.log.append((name, args))
            if self.failing.get(name):
                return self.failing.pop(name)
            try:
                return getattr(self, "_" + name, lambda *_: 0)(*args) or 0
            except BaseException as error:  # an exception cannot pass through native code
                self.raised = error
                return 999

        return ctypes.CFUNCTYPE(_I, *types)(run)

    def result(self, name, *args):
        return self._functions[name](*args) if name in self._functions else 0

    def error(self, code, what):
        if self.raised is not None:
            raise self.raised
        return super().error(code, what)

    def _cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        ctypes.memmove(target, source, nbytes)

    _cuMemcpyDtoDAsync = _cuMemcpyHtoDAsync

    def _cuMemcpyDtoHAsync(self, target, source, nbytes, stream):
        if self.is_late:
            self._under_way.append((target, ctypes.string_at(source, nbytes)))
        else:
            ctypes.memmove(target, source, nbytes)

    def _cuEventSynchronize(self, *_):
        for place, content in self._under_way:
            ctypes.memmove(place, content, len(content))
        self._under_way.clear()

    _cuStreamSynchronize = _cuEventSynchronize

    def _cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        words = (ctypes.c_void_p * 5).from_address(extra)
        entry, table = self.kernels[function]
        size = ctypes.c_size_t.from_address(words[3]).value
        assert not params and (words[0], words[2]) == (1, 2) and words[4] is None and size % 8 == 0
        entry(ctypes.c_void_p.from_address(words[1]).value if table else words[1])

    def _cuLaunchKernelEx(self, config, function, params, extra):
        """A launch that waits for the one before it is like any other, where each is over when the next begins."""
        numbers = (ctypes.c_uint32 * 14).from_address(config)
        stream, attribute = (ctypes.c_void_p * 2).from_address(config + 32)
        assert numbers[12] == 1 and list((ctypes.c_uint32 * 3).from_address(attribute)) == [6, 0, 1]
        return self._functions["cuLaunchKernel"](function, *numbers[:7], stream, params, extra)

    def called(self, name):
        return [args for found, args in self.log if found == name]


class _Module:
    def __init__(self, device, library, name):
        self.device, self.library, self.name = device, library, name

    def function(self, symbol, shared):
        entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.library[self.name])
        handle = 1000 + len(self.device.driver.kernels)
        self.device.driver.kernels[handle] = (entry, symbol.endswith("_table"))
        return handle


class FakeDevice(cuda.Device):
    def __init__(self):
        import threading

        self.index, self.driver, self.name = 0, FakeDriver(), "fake"
        self.lock = threading.RLock()
        self.stream, self.status = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self.handle = ctypes.c_void_p(7)
        self.now = 5
        self._pinned: list[Any] = []

    def load(self, ptx, cubin, what):
        return _Module(self, orc.load(cubin, [what]), what)

    def current_stream(self):
        return self.now

    def new_event(self, timing=False):
        return 77

    def pinned(self, nbytes):
        self._pinned.append((ctypes.c_char * nbytes)())
        return ctypes.addressof(self._pinned[-1])


def on_gpu(kernel, parameters: int = 16, table: bool = False, launches: int = 1) -> GpuKernel:
    """A CPU kernel as a GPU's: its object stands where the machine code would."""
    symbol = kernel.entry + ("_table" if table else "")
    made = tuple(Launch(symbol, (3, 1, 1), 64, 0, 1 if table else parameters) for _ in range(launches))
    text = launcher.host_ir(kernel.entry, made)
    return GpuKernel(
        kernel.name, kernel.entry, orc.compile_ir(text, 0), kernel.workspace, text, "", kernel.object_code, made
    )


def guarded_copy() -> GpuKernel:
    """What copies new state into its place (nova/tile/guarded_copy.py), as a CPU's kernel."""
    text = """
declare ptr @memcpy(ptr, ptr, i64)
define void @guarded_copy(ptr %table) {
entry:
  %n = load i64, ptr %table
  %record_p = getelementptr i64, ptr %table, i64 1
  %record = load ptr, ptr %record_p
  %flag = load i64, ptr %record
  %clear = icmp eq i64 %flag, 0
  br i1 %clear, label %loop, label %done
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %word = mul i64 %i, 3
  %target_p = getelementptr i64, ptr %record_p, i64 %word
  %t_p = getelementptr i64, ptr %target_p, i64 1
  %s_p = getelementptr i64, ptr %target_p, i64 2
  %b_p = getelementptr i64, ptr %target_p, i64 3
  %t = load ptr, ptr %t_p
  %s = load ptr, ptr %s_p
  %b = load i64, ptr %b_p
  %copied = call ptr @memcpy(ptr %t, ptr %s, i64 %b)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}"""
    kernel = KernelObject("guarded_copy", "guarded_copy", orc.compile_ir(text), 0)
    return on_gpu(kernel, table=True)


class FakeExecutable(DeviceExecutable):
    """A device executable whose device is a FakeDevice and whose tensors are the CPU's."""

    device = FakeDevice()

    def _where(self, plan):
        return torch.device("cpu")

    def _driver_device(self, plan):
        return FakeExecutable.device

    def _bind_types(self):
        super()._bind_types()
        for expected in (*self._inputs, *self._outputs):
            object.__setattr__(expected, "device", "cpu")


def pretend_gpu(monkeypatch, build) -> None:
    """nova.jit takes every tensor of a step to be on a GPU; `build(text, target)` makes its kernels."""
    monkeypatch.setenv("NOVA_WORKERS", "0")
    monkeypatch.setenv("NOVA_CACHE", "0")
    monkeypatch.setattr(pipeline, "build_kernel", build)
    own = Cache(None)  # kernels that other builds made of the same text are no use here
    monkeypatch.setattr(pool, "shared", lambda: own)
    monkeypatch.setattr(placement, "device_of", lambda captured: "cuda:0")
    by_name = target.by_name
    monkeypatch.setattr(target, "by_name", lambda name: by_name("h200" if name == "cuda:0" else name))
    original = session.capture

    def capture(*args, **kwargs):
        """The recorded step, its tensors said to be on a GPU: all but step counts, as eager has them."""
        captured = original(*args, **kwargs)
        signature = captured.step.signature
        for specs in (signature.inputs, signature.outputs):
            for i, spec in enumerate(specs):
                name = str(getattr(spec, "source", "")) if hasattr(spec, "source") else ""
                counted = name.endswith("['step']") or (
                    not name and spec.kind == "state" and str(signature.inputs[spec.input].source).endswith("['step']")
                )
                if not counted and getattr(spec, "role", "") not in ("scalar", "seed"):
                    object.__setattr__(spec, "type", type(spec.type)(spec.type.shape, spec.type.dtype, "cuda:0"))
        return captured

    monkeypatch.setattr(session, "capture", capture)
