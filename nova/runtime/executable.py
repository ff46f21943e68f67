"""A compiled step, ready to call: kernels and step program linked, arguments bound, outputs fresh.

A call in the steady state: write the scalars, allocate the outputs, compare every input's pointer with the last
call's (native code, 3 ns each), run the step program without the GIL. State was written in place into the inputs.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nova.errors import DeviceError, NovaError, UnsupportedError
from nova.runtime import memory, orc, step_program
from nova.runtime.arena import Arena, OutOfMemoryError, acquire, is_out_of_memory
from nova.runtime.binding import Expected, PointerTable
from nova.runtime.cache import Cache, CacheWarning, shared
from nova.runtime.dtypes import contiguous_strides, torch_dtype
from nova.runtime.fallback import Fallback, StepMemory
from nova.runtime.kernels import Kernel, decode, encode, identity
from nova.runtime.step_plan import (
    ERROR_BYTES,
    GUARDED_COPY,
    AtenCall,
    KernelCall,
    StepGraph,
    StepPlan,
    TensorRef,
    plan_step,
)

_EXCEPTIONS = {"IndexError": IndexError, "RuntimeError": RuntimeError, "ValueError": ValueError}
_CPU = torch.device("cpu")  # said explicitly: `torch.set_default_device` may say otherwise
_SEED_MASK = (1 << 64) - 1


_libraries: weakref.WeakValueDictionary[bytes, orc.Library] = weakref.WeakValueDictionary()
_libraries_lock = threading.Lock()


def load_kernel(kernel: Kernel) -> orc.Library:
    """The kernel's code in memory; equal objects are loaded once while anything uses them."""
    key = identity(kernel)
    with _libraries_lock:
        library = _libraries.get(key)
        if library is None:
            library = _libraries[key] = orc.load(kernel.object_code, [kernel.entry])
        return library


class Executable:
    """`Executable(plan, kernels, step_object, constants)`; see `build` and `from_entry`."""

    def __init__(
        self,
        plan: StepPlan,
        kernels: Sequence[Kernel],
        step_object: bytes,
        constants: bytes = b"",
        native_binding: bool = True,
    ):
        self.plan = plan
        self.kernels = list(kernels)
        self._step_object, self._constants_bytes = step_object, constants
        self.memory_plan: memory.MemoryPlan | None = None  # only in the process that planned it
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._scalar_block = (ctypes.c_double * max(plan.scalars + plan.seeded, plan.staged_bytes // 8, 1))()
        self._pack_scalars = struct.Struct(f"{plan.scalars}d").pack_into
        self._seed = ctypes.c_uint64.from_buffer(self._scalar_block, 8 * plan.scalars) if plan.seeded else None
        self._memory = self._step_memory(constants)
        self._fallback = Fallback(plan, self._memory)
        self._bind_types()
        self._link(native_binding)

    # -- set-up

    def _step_memory(self, constants: bytes) -> StepMemory:
        """Error records, constants, and the tensors that operations left to PyTorch see."""
        self._errors = (ctypes.c_int64 * (self.plan.error_slots * ERROR_BYTES // 8))()
        self._constants = torch.empty(max(len(constants), 1), dtype=torch.uint8, device=_CPU)
        if constants:
            ctypes.memmove(self._constants.data_ptr(), constants, len(constants))
        block = torch.frombuffer(self._scalar_block, dtype=torch.uint8)
        return StepMemory(self.plan, self._constants, block)

    def _bind_types(self) -> None:
        plan = self.plan
        self._inputs = [
            Expected(
                i.name, i.shape, torch_dtype(i.dtype), contiguous_strides(i.shape),
                plan.device if not i.host or _is_copied(plan, k) else "cpu",
            )
            for k, i in enumerate(plan.inputs)
        ]  # fmt: skip
        self._outputs = [
            Expected(f"output {k}", o.shape, torch_dtype(o.dtype), o.strides, plan.device)
            for k, o in enumerate(plan.outputs)
        ]
        live = {k for k, o in enumerate(plan.outputs) if o.live is not None}
        for k in live:  # a live output replaces this place-holder after the step
            self._outputs[k] = Expected(f"output {k}", (0,), self._outputs[k].dtype, (1,), plan.device)
        self._allocations = [(want.shape, want.strides, want.dtype) for want in self._outputs]
        self._gathered = [
            (k, TensorRef(o.shape, o.dtype, o.dense)) for k, o in enumerate(plan.outputs) if o.dense is not None
        ]
        self._arity = len(plan.inputs), plan.scalars
        self._needs_python = bool(self._fallback) or bool(self._gathered)
        self._live_outputs = [(k, o.live) for k, o in enumerate(plan.outputs) if o.live is not None]

    def _link(self, native_binding: bool) -> None:
        self._link_step([load_kernel(kernel) for kernel in self.kernels], native_binding)
        self.pointer_table.set_base(self.plan.scalar_block, ctypes.addressof(self._scalar_block))
        self.pointer_table.set_base(self.plan.errors, ctypes.addressof(self._errors))

    def _link_step(self, libraries: list[orc.Library], native_binding: bool, exports: Sequence[str] = ()) -> None:
        """Links the step program with its kernels, and lays out the pointer table."""
        plan = self.plan
        self.libraries = libraries
        imports = {
            step_program.kernel_symbol(k): library[kernel.entry]
            for k, (kernel, library) in enumerate(zip(self.kernels, self.libraries, strict=True))
        }
        # The callback refers to the fallback only, so that dropping the executable frees it without a collection.
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(self._fallback.callback)
        # (`ctypes.cast` would make a reference cycle.)
        imports[step_program.CALLBACK] = ctypes.c_void_p.from_address(ctypes.addressof(self._callback)).value or 0
        self._library = orc.load(self._step_object, ["step", *exports], imports, keep=self.libraries)
        self._step_address = self._library["step"]
        self._step = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self._step_address)
        layout = step_program.layout(plan)
        self.pointer_table = PointerTable(layout.slots, layout.relocations, native_binding)
        for slot, value in layout.literals.items():
            self.pointer_table.table[slot] = value
        self.pointer_table.attach(self._inputs, self._outputs, self._step_address, self._step)
        self.pointer_table.set_base(plan.constants, self._constants.data_ptr())

    def _other_arena(self) -> Arena:
        """An arena that is free, with `busy` held, and the table pointed at it."""
        arena = self._acquire(self.plan.arena_bytes, _CPU)
        self._arena = arena
        self._memory.move_to(arena.tensor)
        self.pointer_table.set_base(self.plan.arena, arena.address)
        return arena

    def _acquire(self, nbytes: int, device: torch.device) -> Arena:
        """An arena, or an error that says what the plan needs it for."""
        try:
            return acquire(nbytes, device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            largest = "".join(f"\n  {text}" for text in self.plan.report.get("largest", ()))
            raise OutOfMemoryError(
                f"the compiled step {self.plan.name} needs {nbytes:,} B on {device} for what lives between its "
                f"kernels, beside {self.plan.report.get('state_bytes', 0):,} B of inputs and state, and there is no "
                f"room; nothing has been run. Its largest buffers:{largest}\n{error}"
            ) from error

    def reserve(self) -> None:
        """Makes sure that there is memory for a step. Raises OutOfMemoryError before anything has changed."""
        if self._arena is None or self._arena.superseded:
            with self._lock:
                self._other_arena().busy.release()

    def _wrong_arity(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> TypeError:
        tensors, numbers = self._arity
        return TypeError(
            f"the compiled step takes {tensors} tensors and {numbers} numbers, got {len(inputs)} and {len(scalars)}"
        )

    # -- the hot path

    def __call__(
        self, inputs: Sequence[torch.Tensor], scalars: Sequence[float] = (), seed: int = 0
    ) -> list[torch.Tensor]:
        """Runs the step. Returns the fresh outputs; state was updated in the inputs' own memory."""
        with self._lock:
            if (len(inputs), len(scalars)) != self._arity:
                raise self._wrong_arity(inputs, scalars)
            self._pack_scalars(self._scalar_block, 0, *scalars)
            if self._seed is not None:
                self._seed.value = seed & _SEED_MASK
            outputs = self.allocate_outputs()
            arena = self._arena
            if arena is None or arena.superseded or not arena.busy.acquire(False):
                arena = self._other_arena()
            try:
                if self._needs_python:
                    return self._run_with_python(inputs, outputs)
                stopped = self.pointer_table.run(inputs, outputs)
                if stopped:
                    self._raise(stopped)
                return outputs
            finally:
                arena.busy.release()

    def allocate_outputs(self) -> list[torch.Tensor]:
        """Fresh, uninitialised outputs."""
        new = torch.empty_strided
        return [new(shape, strides, dtype=dtype, device=_CPU) for shape, strides, dtype in self._allocations]

    def _run_with_python(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same with callbacks into PyTorch, or with outputs in strides that are not row-major."""
        self._memory.inputs, self._memory.outputs = inputs, outputs
        try:
            self._run(inputs, outputs)
            for position, dense in self._gathered:
                outputs[position].copy_(self._memory.view(dense))
            for position, live in self._live_outputs:
                outputs[position] = self._fallback.live[live]
            return outputs
        finally:
            self._fallback.live.clear()
            self._memory.release()

    def _run(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """The step program."""
        stopped = self.pointer_table.run(inputs, outputs)
        if stopped:
            self._raise(stopped)

    def _raise(self, stopped: int) -> None:
        item = self.plan.items[stopped - 1]
        if isinstance(item, KernelCall):
            slot = item.slots[-1]
            first = slot.offset // 8  # type: ignore[union-attr]
            value = self._errors[first + 1]
            self._errors[first] = self._errors[first + 1] = 0
            raise flagged(item, value)
        self._raise_from_callback(item, stopped)

    def _raise_from_callback(self, item: Any, stopped: int) -> None:
        error = self._fallback.take_error()
        if error is None:
            raise NovaError(f"the compiled step stopped at item {stopped - 1} without a reason")
        if isinstance(item, AtenCall):
            error.add_note(f"in {item.target}, run through PyTorch inside a compiled step" +
                           (f"\n  at {item.source}" if item.source else ""))  # fmt: skip
        raise error

    # -- reports

    @property
    def arena_bytes(self) -> int:
        return self.plan.arena_bytes

    @property
    def left_to_pytorch(self) -> dict[str, int]:
        """ATen operation -> number of calls a step."""
        counts: dict[str, int] = {}
        for call in self.plan.aten_calls:
            counts[call.target] = counts.get(call.target, 0) + 1
        return counts

    def on_bucket(self, handler: Any) -> None:
        """`handler(k)` is called when gradient bucket k is complete."""
        self._fallback.on_bucket = handler

    # -- storage

    def entry(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Everything a process needs to rebuild this without a compiler: JSON and raw bytes."""
        described, blobs = [], {"step": self._step_object, "constants": self._constants_bytes}
        for i, kernel in enumerate(self.kernels):
            meta, parts = encode(kernel, text=False)
            described.append({**meta, "parts": list(parts)})
            blobs |= {f"kernel{i}.{name}": part for name, part in parts.items()}
        return {"plan": self.plan.to_json(), "kernels": described}, blobs

    @classmethod
    def from_entry(cls, meta: Mapping[str, Any], blobs: Mapping[str, bytes]) -> Executable:
        kernels = [
            decode(k, {name: blobs[f"kernel{i}.{name}"] for name in k["parts"]}) for i, k in enumerate(meta["kernels"])
        ]
        plan = StepPlan.from_json(meta["plan"])
        return class_for(plan)(plan, kernels, blobs["step"], blobs["constants"])


def flagged(item: KernelCall, value: int) -> Exception:
    """The exception that eager would have raised for a value that a kernel refused."""
    kind, _, message = item.raises.partition(": ")
    text = message.replace("{value}", str(value)) + (f"\n  at {item.source}" if item.source else "")
    return _EXCEPTIONS.get(kind, RuntimeError)(text)


def class_for(plan: StepPlan) -> type[Executable]:
    """What runs a plan: on the CPU this module's class, on a GPU the one that launches."""
    if plan.device == "cpu":
        return Executable
    from nova.runtime.device_executable import DeviceExecutable

    return DeviceExecutable


def _is_copied(plan: StepPlan, index: int) -> bool:
    """Whether a host input is copied as a whole, so that what is bound is a tensor on the device."""
    return plan.inputs[index].host and all(cell.input != index for cell in plan.cells)


@dataclass
class PlannedStep:
    """A step compiled for a machine that is not this one: everything but the linking."""

    plan: StepPlan
    kernels: list[Kernel]
    memory_plan: memory.MemoryPlan
    step_object: bytes
    constants: bytes


def plan_and_compile(
    graph: StepGraph, kernels: Mapping[str, Kernel], reorder: bool = False, target: Any = None
) -> PlannedStep:
    """Plans a step and compiles its program. `kernels`: callee symbol -> object; symbols may share one. `target`: what
    the kernels are for, where that is not the device of the graph."""
    distinct: dict[bytes, int] = {}
    objects: list[Kernel] = []
    numbers: dict[str, tuple[int, int]] = {}
    for symbol in dict.fromkeys(call.target for call in graph.calls if call.kind == "kernel"):
        kernel = kernels[symbol]
        key = identity(kernel)
        if key not in distinct:
            distinct[key] = len(objects)
            objects.append(kernel)
        numbers[symbol] = (distinct[key], kernel.workspace)
    plan, constants, laid_out = plan_step(graph, numbers, [kernel.name for kernel in objects], reorder)
    if plan.kernels[len(objects) :] == [GUARDED_COPY]:
        objects.append(_guarded_copy(target or graph.device))
    return PlannedStep(plan, objects, laid_out, step_program.compile_step(plan), constants)


def _guarded_copy(target: Any) -> Kernel:
    """The kernel that copies new state into its place where no error was found."""
    from nova.runtime import pool
    from nova.schedule import target as targets
    from nova.tile import guarded_copy

    chosen = targets.by_name(target) if isinstance(target, str) else target
    return next(iter(pool.compile_kernels([guarded_copy.TEXT], chosen)))


def link(graph: StepGraph, kernels: Mapping[str, Kernel], reorder: bool = False, target: Any = None) -> Executable:
    """Plans, compiles and links a step."""
    made = plan_and_compile(graph, kernels, reorder, target)
    executable = class_for(made.plan)(made.plan, made.kernels, made.step_object, made.constants)
    executable.memory_plan = made.memory_plan
    return executable


def build(step_module: Any, kernels: Mapping[str, Kernel], signature: Any = None) -> Executable:
    """From the outlined level-2 module (MLIR) and its compiled kernels to a callable."""
    from nova.runtime.read_step import read_step

    return link(read_step(step_module, signature), kernels)


def save(executable: Executable, digest: str, cache: Cache | None = None, **about: Any) -> None:
    """Keeps a compiled step in the artifact cache under its key. `about`: JSON for the reader, such as key parts."""
    meta, blobs = executable.entry()
    (cache or shared()).put("step", digest, {**meta, "about": about}, blobs)


def load(digest: str, cache: Cache | None = None) -> Executable | None:
    """The compiled step of that key from memory or disk; None where there is none that this version can use."""
    entry = (cache or shared()).get("step", digest)
    if entry is None:
        return None
    try:
        return Executable.from_entry(entry.meta, entry.blobs)
    except (DeviceError, UnsupportedError):
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # written by something else under our key
        warnings.warn(f"Nova cache: ignoring step {digest}: {error}; compiling again", CacheWarning, stacklevel=2)
        return None
