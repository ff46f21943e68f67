"""The CUDA driver, by ctypes on libcuda: what loads kernels and what the step program calls. No package is needed.

    driver()            the library of this machine, or a NovaError that says what is missing
    device(0)           PyTorch's device 0: its primary context, its limits, and the cells that native code reads

Native code gets the addresses of the driver's functions, so a step's launches never pass through Python. Nothing here
is called before PyTorch has initialised the device.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from nova.errors import DeviceError, UnsupportedError

# Names by which the library exports the current version of each function.
FUNCTIONS = {
    "cuInit": "cuInit",
    "cuDriverGetVersion": "cuDriverGetVersion",
    "cuDeviceGet": "cuDeviceGet",
    "cuDeviceGetName": "cuDeviceGetName",
    "cuDeviceGetAttribute": "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent": "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent": "cuCtxPopCurrent_v2",
    "cuModuleLoadDataEx": "cuModuleLoadDataEx",
    "cuModuleUnload": "cuModuleUnload",
    "cuModuleGetFunction": "cuModuleGetFunction",
    "cuFuncSetAttribute": "cuFuncSetAttribute",
    "cuLaunchKernel": "cuLaunchKernel",
    "cuLaunchKernelEx": "cuLaunchKernelEx",
    "cuMemcpyHtoDAsync": "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync": "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync": "cuMemcpyDtoHAsync_v2",
    "cuMemHostAlloc": "cuMemHostAlloc",
    "cuMemFreeHost": "cuMemFreeHost",
    "cuEventCreate": "cuEventCreate",
    "cuEventDestroy": "cuEventDestroy_v2",
    "cuEventRecord": "cuEventRecord",
    "cuEventQuery": "cuEventQuery",
    "cuEventSynchronize": "cuEventSynchronize",
    "cuEventElapsedTime": "cuEventElapsedTime",
    "cuStreamWaitEvent": "cuStreamWaitEvent",
    "cuStreamSynchronize": "cuStreamSynchronize",
    "cuGetErrorName": "cuGetErrorName",
    "cuGetErrorString": "cuGetErrorString",
}

# Attribute numbers of CUdevice_attribute.
ATTRIBUTES = {
    "clock": 13,  # kHz
    "sms": 16,
    "memory_clock": 36,  # kHz
    "memory_bus": 37,  # bits
    "l2": 38,
    "threads_sm": 39,
    "major": 75,
    "minor": 76,
    "smem_sm": 81,
    "registers_sm": 82,
    "smem_block": 97,  # opt-in maximum
    "blocks_sm": 106,
    "smem_reserve": 111,
}

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_JIT_INFO, _JIT_INFO_SIZE, _JIT_ERROR, _JIT_ERROR_SIZE = 3, 4, 5, 6  # CU_JIT_* of the logs
_LOG_BYTES = 16384
_STATIC_SHARED = 48 << 10  # a kernel may have this much without asking
_OUT_OF_MEMORY = 2
_TOO_NEW = {222}  # PTX of a version that the driver does not read
# Errors after which the context is of no use, whoever caused them.
_STICKY = {700, 702, 710, 714, 715, 716, 717, 718, 719, 720}
_LOST = (
    "The CUDA context is lost, and with it everything on the GPU: start this process again. Errors of kernels are seen "
    "late, by whatever is called next"
)

# CUDA version of a driver -> the newest PTX it reads.
PTX_OF_CUDA = {
    (11, 8): (7, 8), (12, 0): (8, 0), (12, 1): (8, 1), (12, 2): (8, 2), (12, 3): (8, 3), (12, 4): (8, 4),
    (12, 5): (8, 5), (12, 6): (8, 5), (12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8), (13, 0): (9, 0),
    (13, 1): (9, 1), (13, 2): (9, 2),
}  # fmt: skip


class CudaError(DeviceError):
    """A call of the CUDA driver failed. `code` is its CUresult."""

    def __init__(self, message: str, code: int = 0):
        super().__init__(message)
        self.code = code


class Driver:
    """The functions of libcuda. `address(name)` is for native code; `call(name, ...)` raises what goes wrong."""

    def __init__(self, library: Any):
        self._functions: dict[str, Any] = {}
        # Whether all compiled steps are known to have ended well; the runtime says so where it can.
        self.steps_are_done: Callable[[], bool] = lambda: False
        for name, symbol in FUNCTIONS.items():
            self._functions[name] = getattr(library, symbol)

    def address(self, name: str) -> int:
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def result(self, name: str, *args: Any) -> int:
        """Calls a function; whole numbers go as 64-bit words, which serve for handles, sizes and enumerations alike."""
        return int(self._functions[name](*(ctypes.c_int64(a) if isinstance(a, int) else a for a in args)))

    def call(self, name: str, *args: Any) -> None:
        code = self.result(name, *args)
        if code:
            raise self.error(code, name)

    def error(self, code: int, what: str) -> CudaError:
        """A CUresult as an exception."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.result("cuGetErrorName", code, ctypes.byref(name))
        self.result("cuGetErrorString", code, ctypes.byref(text))
        described = f"{(name.value or b'an unknown error').decode()} ({code}): {(text.value or b'').decode()}"
        message = f"{what} failed with {described}"
        if code in _STICKY:
            message += f". {_LOST}. {self._suspects()}: run again with CUDA_LAUNCH_BLOCKING=1 to see which"
        return CudaError(message, code)

    def _suspects(self) -> str:
        if self.steps_are_done():
            return "All compiled steps that were launched have ended well, so this comes from a kernel outside Nova"
        return "It may come from any kernel launched before, of a compiled step or outside Nova"

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    @property
    def ptx_version(self) -> tuple[int, int]:
        """The newest PTX that the driver reads."""
        known = [cuda for cuda in PTX_OF_CUDA if cuda <= self.version]
        return PTX_OF_CUDA[max(known)] if known else (7, 0)


@cache
def driver() -> Driver:
    """The driver of this machine."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no CUDA driver: {error}. Install NVIDIA's driver, or run the step on CPU tensors") from None
    try:
        found = Driver(library)
    except AttributeError as error:
        raise DeviceError(f"the CUDA driver is too old for Nova ({error}); it needs one of CUDA 12 or newer") from None
    found.call("cuInit", 0)
    return found


class Module:
    """Machine code in a context. Unloaded when dropped, if the context still works."""

    def __init__(self, owner: Device, image: bytes, what: str):
        self._owner = owner
        self._handle = ctypes.c_void_p()
        log, errors = (ctypes.create_string_buffer(_LOG_BYTES) for _ in range(2))
        options = (ctypes.c_int * 4)(_JIT_INFO, _JIT_INFO_SIZE, _JIT_ERROR, _JIT_ERROR_SIZE)
        values = (ctypes.c_void_p * 4)(
            ctypes.addressof(log), ctypes.c_void_p(_LOG_BYTES), ctypes.addressof(errors), ctypes.c_void_p(_LOG_BYTES)
        )
        with owner.context():
            code = owner.driver.result(
                "cuModuleLoadDataEx", ctypes.byref(self._handle), ctypes.c_char_p(image + b"\0"), 4, options, values
            )
        if code:
            error = owner.driver.error(code, f"loading kernel {what}")
            text = errors.value.decode(errors="replace").strip()
            raise CudaError(f"{error}\n{text}" if text else str(error), code)

    def function(self, symbol: str, shared: int = 0) -> int:
        """The address of a kernel, with leave to use `shared` bytes of dynamic shared memory."""
        owner, found = self._owner, ctypes.c_void_p()
        with owner.context():
            owner.driver.call("cuModuleGetFunction", ctypes.byref(found), self._handle, symbol.encode())
            if shared > _STATIC_SHARED:
                limit = owner.attribute("smem_block")
                if shared > limit:
                    raise DeviceError(
                        f"kernel {symbol} needs {shared:,} B of shared memory a block; {owner.name} has {limit:,} B"
                    )
                owner.driver.call("cuFuncSetAttribute", found, MAX_DYNAMIC_SHARED, shared)
        return found.value or 0

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), ctypes.c_void_p()
        if handle:
            try:
                with self._owner.context():
                    self._owner.driver.result("cuModuleUnload", handle)
            except Exception:  # the interpreter, or the context, is going away
                pass


class _Pushed:
    """The device's context, current in this thread for a while."""

    def __init__(self, owner: Device):
        self.owner = owner

    def __enter__(self) -> None:
        self.owner.driver.call("cuCtxPushCurrent", self.owner.handle)

    def __exit__(self, *error: object) -> None:
        self.owner.driver.result("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))


class Device:
    """A GPU as PyTorch numbers them.

    `stream` and `status` are cells that native code reads and writes: the stream to launch on, and the first error of a
    launch. Whoever launches holds `lock` from setting the one to reading the other.
    """

    def __init__(self, index: int, found: Driver):
        self.index, self.driver = index, found
        self.lock = threading.RLock()
        self.stream, self.status = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._number = ctypes.c_int()
        found.call("cuDeviceGet", ctypes.byref(self._number), index)
        self.handle = ctypes.c_void_p()
        found.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.handle), self._number)
        text = ctypes.create_string_buffer(256)
        found.call("cuDeviceGetName", text, 256, self._number)
        self.name = text.value.decode()

    def context(self) -> _Pushed:
        return _Pushed(self)

    def attribute(self, name: str) -> int:
        value = ctypes.c_int()
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), ATTRIBUTES[name], self._number)
        return value.value

    @property
    def capability(self) -> tuple[int, int]:
        return self.attribute("major"), self.attribute("minor")

    def load(self, ptx: str, cubin: bytes, what: str) -> Module:
        """A kernel's code: the cubin where there is one, else PTX for the driver's own assembler."""
        if cubin:
            try:
                return Module(self, cubin, what)
            except CudaError as error:
                if not ptx or error.code in _STICKY or is_out_of_memory(error):
                    raise  # else a cubin that this driver is too old for
        check_ptx(ptx, self.driver, what)
        try:
            return Module(self, ptx.encode(), what)
        except CudaError as error:
            if error.code in _TOO_NEW:  # the driver knows better than the table of versions
                raise _too_old(ptx, self.driver, what) from error
            raise

    def current_stream(self) -> int:
        """PyTorch's current stream, as a CUstream."""
        import torch

        return torch._C._cuda_getCurrentRawStream(self.index)

    def new_event(self, timing: bool = False) -> int:
        event = ctypes.c_void_p()
        with self.context():
            self.driver.call("cuEventCreate", ctypes.byref(event), 0 if timing else 2)
        return event.value or 0

    def pinned(self, nbytes: int) -> int:
        """Address of page-locked host memory; freed with `free_pinned`."""
        found = ctypes.c_void_p()
        with self.context():
            self.driver.call("cuMemHostAlloc", ctypes.byref(found), nbytes, 1)
        return found.value or 0


def check_ptx(ptx: str, found: Driver, what: str) -> None:
    """Raises where the driver is too old for the PTX version of a kernel."""
    if _version_of(ptx) > found.ptx_version:
        raise _too_old(ptx, found, what)


def _version_of(ptx: str) -> tuple[int, int]:
    match = re.search(r"^\.version\s+(\d+)\.(\d+)", ptx, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _too_old(ptx: str, found: Driver, what: str) -> UnsupportedError:
    wanted, have, cuda = (".".join(map(str, v)) for v in (_version_of(ptx), found.ptx_version, found.version))
    return UnsupportedError(
        f"kernel {what} is PTX {wanted} and this driver (CUDA {cuda}) reads PTX up to {have}: update the driver, or "
        "install ptxas (pip install nvidia-cuda-nvcc), with which kernels become machine code here"
    )


_devices: dict[int, Device] = {}
_devices_lock = threading.Lock()


def device(index: int) -> Device:
    """PyTorch's CUDA device `index`."""
    found = _devices.get(index)
    if found is None:
        with _devices_lock:
            found = _devices.get(index)
            if found is None:
                found = Device(index, driver())  # PyTorch and the driver both obey CUDA_VISIBLE_DEVICES
                _check_capability(found)
                _devices[index] = found
    return found


def _check_capability(found: Device) -> None:
    if found.capability < (8, 0):
        major, minor = found.capability
        raise UnsupportedError(
            f"{found.name} has compute capability {major}.{minor}; Nova compiles for 8.0 (Ampere) and newer"
        )


def is_out_of_memory(error: CudaError) -> bool:
    return error.code == _OUT_OF_MEMORY
