"""A compiled step on an NVIDIA GPU: the same plan, launched on PyTorch's current stream without waiting for it.

A call in the steady state: look at the error records that arrived (host memory), write the scalars, allocate the
outputs, compare pointers, run the step program without the GIL. That program copies the scalars, launches every kernel,
and records an event. Errors that kernels found are raised by a later call, or by `nova.synchronize()`.

The arena belongs to the stream of the last step; a step on another stream waits for that one's event.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from nova.errors import NovaError
from nova.gpu import launcher
from nova.progress import notice
from nova.runtime import cuda, device_program, orc
from nova.runtime.arena import Arena, OutOfMemoryError
from nova.runtime.error_records import ErrorRecords, put_back
from nova.runtime.executable import _SEED_MASK, Executable, flagged
from nova.runtime.fallback import StepMemory
from nova.runtime.kernels import LoadedKernel, identity
from nova.runtime.step_plan import ERROR_BYTES, KernelCall

_CPU = torch.device("cpu")
_ERRORS_HOST = device_program.WORDS.index("errors_host")
ALIGNMENT = 16  # bytes: kernels move this much at once, as allocators of GPU memory let them
alive: weakref.WeakSet[DeviceExecutable] = weakref.WeakSet()  # for `synchronize`

_libraries: weakref.WeakValueDictionary[tuple[Any, ...], orc.Library] = weakref.WeakValueDictionary()
_libraries_lock = threading.Lock()


def load_kernel(kernel: Any, device: cuda.Device) -> orc.Library:
    """A kernel's launcher, its device code loaded; equal kernels are loaded once a device while anything uses them."""
    key = (identity(kernel), id(device))
    with _libraries_lock:
        library = _libraries.get(key)
        if library is None:
            module = device.load(kernel.ptx, kernel.cubin, kernel.name) if kernel.launches else None
            functions = [module.function(launch.symbol, launch.shared) for launch in kernel.launches] if module else []
            library = orc.load(kernel.object_code, [kernel.entry, launcher.CONTEXT], keep=[module, device])
            launcher.fill(library, device, functions)
            _libraries[key] = library
        return library


class _Event:
    """An event of a device, destroyed with its owner."""

    def __init__(self, device: cuda.Device):
        self._device, self.handle = device, device.new_event()

    def __del__(self) -> None:
        self._device.driver.result("cuEventDestroy", self.handle)


def device_named(name: str) -> cuda.Device:
    """The device of a plan, such as "cuda:0"."""
    return cuda.device(torch.device(name).index or 0)


class DeviceExecutable(Executable):
    """`DeviceExecutable(plan, kernels, step_object, constants)`: see `Executable`."""

    def __init__(
        self, plan: Any, kernels: Any, step_object: bytes, constants: bytes = b"", native_binding: bool = True
    ):
        self._torch_device = self._where(plan)
        self._device = self._driver_device(plan)
        self._stream: int | None = None  # of the last step
        self._device.driver.steps_are_done = functools.partial(_steps_are_done, self._device)
        super().__init__(plan, kernels, step_object, constants, native_binding)
        alive.add(self)

    # (a test that has no GPU puts its own in their place)
    def _where(self, plan: Any) -> torch.device:
        return torch.device(plan.device)

    def _driver_device(self, plan: Any) -> cuda.Device:
        torch.cuda.init()
        return device_named(plan.device)

    # -- set-up

    def _step_memory(self, constants: bytes) -> StepMemory:
        where, plan = self._torch_device, self.plan
        data = torch.frombuffer(bytearray(constants or b"\0"), dtype=torch.uint8)
        self._constants = data.to(where)
        self._found = ErrorRecords(plan.error_slots, self._device, where)
        self._raises = plan.error_slots > 1
        self._launching: Sequence[torch.Tensor] = ()  # inputs of the call that is being launched
        self._counted = [cell.input for cell in plan.cells if cell.update == "count"]
        self._copied = [k for k, i in enumerate(plan.inputs) if i.host and all(c.input != k for c in plan.cells)]
        self._written = [k for k in self._copied if plan.inputs[k].written]
        self._to_host = [k for k, o in enumerate(plan.outputs) if o.host]
        self._in_cell = [i.host and k not in self._copied for k, i in enumerate(plan.inputs)]
        self._moved: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.copied_inputs = 0  # the most inputs that a call had to copy because of where they lie
        return StepMemory(plan, self._constants, None)

    def _link(self, native_binding: bool) -> None:
        device = self._device
        libraries = [load_kernel(kernel, device) for kernel in self.kernels]
        self._link_step(libraries, native_binding, [device_program.CONTEXT])
        words = len(device_program.WORDS)
        self._context = (ctypes.c_uint64 * words).from_address(self._library[device_program.CONTEXT])
        self._popped = ctypes.c_uint64()
        self._event = _Event(device)  # after the last step
        self._shadow = (ctypes.c_uint8 * device_program.shadow_bytes(self.plan))()
        self._block = torch.zeros(max(self.plan.block_bytes, 1), dtype=torch.uint8, device=self._torch_device)
        values: dict[str, int | None] = {
            name: device.driver.address(name) for name in device_program.WORDS if name.startswith("cu")
        }
        values |= {
            "context": device.handle.value, "stream": ctypes.addressof(device.stream),
            "status": ctypes.addressof(device.status), "staging": ctypes.addressof(self._scalar_block),
            "errors": self._found.tensor.data_ptr(), "event": self._event.handle,
            "shadow": ctypes.addressof(self._shadow), "block": self._block.data_ptr(),
            "popped": ctypes.addressof(self._popped),
        }  # fmt: skip
        for name, value in values.items():
            self._set(name, value)
        self.pointer_table.require_alignment(ALIGNMENT, self._aligned)
        self.pointer_table.set_base(self.plan.errors, self._found.tensor.data_ptr())
        self.pointer_table.set_base(self.plan.scalar_block, self._block.data_ptr())
        if self._torch_device.type == "cuda":
            torch.cuda.synchronize(self._torch_device)  # constants and records are there, whatever stream comes next

    def _aligned(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs, with copies in the place of those that lie where kernels cannot read sixteen bytes at once."""
        found = list(inputs)
        for k, tensor in enumerate(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() % ALIGNMENT and not self._in_cell[k]:
                found[k] = tensor.detach().clone(memory_format=torch.preserve_format)
                self._moved.append((k, tensor, found[k]))
        if self._moved and not self.copied_inputs:
            names = ", ".join(self.plan.inputs[k].name for k, *_ in self._moved[:3])
            notice(
                f"{self.plan.name}: {len(self._moved)} inputs do not start at a multiple of {ALIGNMENT} bytes "
                f"({names}): each call copies them"
            )
        self.copied_inputs = max(self.copied_inputs, len(self._moved))
        return found

    def _set(self, name: str, value: Any) -> None:
        self._context[device_program.WORDS.index(name)] = value or 0

    def _other_arena(self) -> Arena:
        """An arena that is free, with `busy` held, and the table pointed at it."""
        arena = self._acquire(self.plan.arena_bytes, self._torch_device)
        self._arena = arena
        self._memory.move_to(arena.tensor, self._block)
        self.pointer_table.set_base(self.plan.arena, arena.address)
        return arena

    # -- the hot path

    def __call__(
        self, inputs: Sequence[torch.Tensor], scalars: Sequence[float] = (), seed: int = 0
    ) -> list[torch.Tensor]:
        """Launches the step. Returns the fresh outputs; state changes in the inputs' own memory, in stream order."""
        with self._lock:
            if (len(inputs), len(scalars)) != self._arity:
                raise self._wrong_arity(inputs, scalars)
            if self._raises:
                self.raise_found()
            self._pack_scalars(self._scalar_block, 0, *scalars)
            if self._seed is not None:
                self._seed.value = seed & _SEED_MASK
            given = inputs
            if self._copied:
                inputs = list(inputs)
                for k in self._copied:
                    inputs[k] = inputs[k].to(self._torch_device, non_blocking=True)
            outputs = self.allocate_outputs()
            arena = self._arena
            if arena is None or arena.superseded or not arena.busy.acquire(False):
                arena = self._other_arena()
            device = self._device
            try:
                with device.lock:
                    stream = device.current_stream()
                    if arena.stream != stream or self._stream != stream:
                        self._change_stream(arena, stream)
                    arena.event = self._event
                    device.stream.value, device.status.value = stream, 0
                    self._launch(given, inputs, outputs)
            finally:
                arena.busy.release()
                if self._moved:
                    self._move_back()
            for k in self._written:
                given[k].copy_(inputs[k])
            for k in self._to_host:
                outputs[k] = outputs[k].to(_CPU)
            return outputs

    def _launch(
        self, given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Runs the step program. `given`: the inputs as the caller has them, some on the CPU."""
        self._launching = given
        try:
            if self._needs_python:
                self._run_with_python(self._aligned(inputs), outputs)
                if self._gathered:
                    self._mark_end()  # PyTorch has read the arena after the program's own mark
            else:
                self._run(inputs, outputs)
        finally:
            self._launching = ()

    def _run(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if not self._raises:
            super()._run(inputs, outputs)
            return
        self._context[_ERRORS_HOST] = self._found.next([self._launching[k] for k in self._counted])
        try:
            super()._run(inputs, outputs)
        except BaseException:
            self._found.cancel()
            raise

    def _move_back(self) -> None:
        """State that was copied to be aligned gets its new contents."""
        for k, tensor, copy in self._moved:
            if self.plan.inputs[k].written:
                tensor.detach().copy_(copy)
        self._moved.clear()

    def allocate_outputs(self) -> list[torch.Tensor]:
        """Fresh, uninitialised outputs."""
        new, device = torch.empty_strided, self._torch_device
        try:
            return [new(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._allocations]
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"there is no room on {device} for the {len(self._allocations)} tensors that the compiled step "
                f"{self.plan.name} returns or leaves as gradients; nothing has been run\n{error}"
            ) from error

    def _change_stream(self, arena: Arena, stream: int) -> None:
        """The last step in this arena, or of this executable, ran on another stream: this one waits for it."""
        before = {id(event): event for last, event in ((arena.stream, arena.event), (self._stream, self._event))
                  if last is not None and last != stream}  # fmt: skip
        for event in before.values():
            with self._device.context():
                self._device.driver.call("cuStreamWaitEvent", stream, event.handle, 0)  # type: ignore[attr-defined]
        if before and self._torch_device.type == "cuda":
            for tensor in (arena.tensor, self._block, self._found.tensor, self._constants):
                tensor.record_stream(torch.cuda.current_stream(self._torch_device))
        arena.stream = self._stream = stream

    def __del__(self) -> None:
        """Code that the GPU may still be running must not be unloaded."""
        if getattr(self, "_stream", None) is not None:
            self._device.driver.result("cuEventSynchronize", self._event.handle)

    # -- errors

    def _mark_end(self) -> None:
        """Everything that the stream holds by now is over when the event comes."""
        with self._device.context():
            self._device.driver.result("cuEventRecord", self._event.handle, self._device.stream.value)

    def _raise(self, stopped: int) -> None:
        status, self._device.status.value = self._device.status.value, 0
        if stopped != device_program.NOT_STARTED:
            put_back([self._launching[k] for k in self._counted])
            self._mark_end()  # what was launched before still runs in the arena
        if self._raises and stopped in (device_program.NOT_STARTED, device_program.NOT_SENT):
            self._found.cancel()  # nothing of this step runs: it is not among those that may have caused the error
        if stopped >= device_program.DRIVER_CALL:
            raise self._device.driver.error(status, f"the compiled step {self.plan.name}")
        item = self.plan.items[stopped - 1]
        if isinstance(item, KernelCall):
            kernel: LoadedKernel = self.kernels[item.kernel]  # type: ignore[assignment]
            shapes = ", ".join(f"{launch.symbol} {launch.grid} x {launch.threads}" for launch in kernel.launches)
            place = f"\n  at {item.source}" if item.source else ""
            raise self._device.driver.error(status, f"launching kernel {kernel.name} ({shapes}){place}\n ")
        self._raise_from_callback(item, stopped)

    def raise_found(self) -> None:
        """Raises what a kernel of an earlier call found, if its record has arrived, and clears it. That call and those
        after it have left lifted state as it was; so have the step counts on the host, once this raises."""
        records = self._found
        if records.full:
            self._wait()
        if not records.bad():
            return
        self._wait()
        found = records.take()
        if self._torch_device.type == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()
        for item in self.plan.items:
            if isinstance(item, KernelCall) and item.raises:
                slot = item.slots[-1].offset // ERROR_BYTES  # type: ignore[union-attr]
                if slot in found:
                    error = flagged(item, found[slot])
                    error.add_note("found by an earlier call of the compiled step: a GPU's steps are not waited for")
                    raise error
        raise NovaError(f"the compiled step {self.plan.name} found a bad value, and no kernel says which")

    def synchronize(self) -> None:
        """Waits for the last step and raises what it found."""
        self._wait()
        if self._raises:
            with self._lock:
                self.raise_found()

    def _wait(self) -> None:
        """Until the last step is done."""
        if self._stream is not None:
            with self._device.context():
                self._device.driver.call("cuEventSynchronize", self._event.handle)


def synchronize() -> None:
    """Waits for every compiled step and raises what one of them found."""
    for executable in list(alive):
        executable.synchronize()


def _steps_are_done(device: cuda.Device) -> bool:
    """Whether every compiled step that was launched on a device is known to have ended, and its kernels to be fine."""
    launched = [e for e in alive if e._device is device and e._stream is not None]
    return all(executable._raises and executable._found.all_known() for executable in launched)


__all__ = ["DeviceExecutable", "NovaError", "alive", "load_kernel", "synchronize"]
