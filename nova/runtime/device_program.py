"""The step program of a GPU: the same list of calls, launched in order on one stream, with what surrounds them.

    define i64 @step(ptr %table) {
      push the device's context
      count cells:  staging[24] = *host; *host += 1        ; step counts that optimizers keep on the CPU
      copy staging to the block of scalars, if it changed   ; pageable memory: the driver has read it when it returns
      call void @nova_kernel_3(ptr %a0)                     ; launches; stop at the first that fails
      call memcpy(device to device) ...
      copy the error records to page-locked memory          ; read later, without waiting
      record the event after which the arena is free
      pop the context
    }

Nothing waits for the GPU, except where a number in the CPU's memory has a new value that only the GPU knows ("fetch").
Addresses that are known at run time lie in `@nova_device`, which the executable fills.
"""

from __future__ import annotations

from collections.abc import Iterator

from nova.runtime.dtypes import itemsize
from nova.runtime.step_plan import ERROR_BYTES, AtenCall, BucketReady, CopyBytes, HostCell, KernelCall, StepPlan
from nova.runtime.step_program import CALLBACK, TableLayout, kernel_symbol, layout

CONTEXT = "nova_device"
WORDS = (
    "cuCtxPushCurrent", "cuCtxPopCurrent", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync",
    "cuEventRecord", "cuStreamSynchronize",  # the driver's functions
    "context", "stream", "status",  # a CUcontext; addresses of the cells
    "event", "staging", "block", "shadow", "errors", "errors_host", "popped",
)  # fmt: skip
DRIVER_CALL = 1 << 40  # what @step returns where a copy or an event failed; the status says how
NOT_STARTED = DRIVER_CALL + 1  # the same where the context failed, before anything was done
NOT_SENT = DRIVER_CALL + 2  # and where the scalars could not be copied: counts have moved on, nothing was launched


def emit(plan: StepPlan) -> str:
    """LLVM IR text of the step."""
    table = layout(plan)
    used = sorted({item.kernel for item in plan.items if isinstance(item, KernelCall)})
    lines = [
        f"; step {plan.name} on {plan.device}",
        _UPLOAD,
        f"@{CONTEXT} = global [{len(WORDS)} x ptr] zeroinitializer, align 8",
        f"declare i64 @{CALLBACK}(i64)",
        *(f"declare void @{kernel_symbol(k)}(ptr) nounwind" for k in used),
        "",
        "define i64 @step(ptr %table) {",
        "entry:",
    ]
    writer = _Writer()
    lines += [*_words(), "  %stream = load ptr, ptr %w_stream"]
    lines += writer.checked("call i32 %w_cuCtxPushCurrent(ptr %w_context)", "unpushed")
    lines += [line for cell, slot in zip(plan.cells, table.cell_slot, strict=True) for line in _read(cell, slot)]
    if plan.staged_bytes:
        # Kernels write new values into their copies of numbers, so those are never known to be what they were.
        lines += ["  store i64 0, ptr %w_shadow"] if any(cell.update for cell in plan.cells) else []
        lines += writer.upload("staged", "%w_shadow", "%w_staging", "%w_block", plan.staged_bytes, "unsent")
    lines += _items(plan, table, writer)
    lines += _after(plan, table, writer)  # (its event makes sure that something can fail)
    unsent = writer.failures["unsent"]
    return "\n".join([
        *lines, "  br label %end", "end:", f"  %result = phi i64 {writer.results('0')}",
        "  %popped = call i32 %w_cuCtxPopCurrent(ptr %w_popped)", "  ret i64 %result",
        "failed:", f"  %code = phi i32 {writer.failures['failed']}", *_keep("code"), "  br label %end",
        *(["unsent:", f"  %sent = phi i32 {unsent}", *_keep("sent"), "  br label %end"] if unsent else []),
        "unpushed:", f"  %first = phi i32 {writer.failures['unpushed']}", *_keep("first"), f"  ret i64 {NOT_STARTED}",
        "}", "",
    ])  # fmt: skip


_UPLOAD = """
declare i32 @memcmp(ptr, ptr, i64)
declare ptr @memcpy(ptr, ptr, i64)

define internal i32 @nova_upload(ptr %flag, ptr %source, ptr %target, i64 %n, ptr %copy, ptr %stream) {
entry:
  %shadow = getelementptr i8, ptr %flag, i64 8
  %valid = load i64, ptr %flag
  %known = icmp eq i64 %valid, 1
  br i1 %known, label %compare, label %send
compare:
  %difference = call i32 @memcmp(ptr %shadow, ptr %source, i64 %n)
  %same = icmp eq i32 %difference, 0
  br i1 %same, label %done, label %send
send:
  store i64 0, ptr %flag
  %copied = call ptr @memcpy(ptr %shadow, ptr %source, i64 %n)
  %code = call i32 %copy(ptr %target, ptr %shadow, i64 %n, ptr %stream)
  %good = icmp eq i32 %code, 0
  br i1 %good, label %keep, label %done
keep:
  store i64 1, ptr %flag
  br label %done
done:
  %result = phi i32 [0, %compare], [%code, %send], [0, %keep]
  ret i32 %result
}
"""


def _words() -> Iterator[str]:
    for position, name in enumerate(WORDS):
        yield f"  %w_{name}_p = getelementptr ptr, ptr @{CONTEXT}, i64 {position}"
        yield f"  %w_{name} = load ptr, ptr %w_{name}_p"


def _keep(code: str) -> list[str]:
    return [f"  %{code}_wide = zext i32 %{code} to i64", f"  store i64 %{code}_wide, ptr %w_status"]


class _Writer:
    """Numbers blocks, and remembers which ones leave for the common exits."""

    def __init__(self) -> None:
        self.count = 0
        self.block = "entry"
        self.failures: dict[str, str] = {"failed": "", "unpushed": "", "unsent": ""}
        self._stops: list[tuple[str, str]] = []

    def next(self) -> int:
        self.count += 1
        return self.count

    def checked(self, call: str, exit: str = "failed") -> list[str]:
        """A call of the driver whose failure ends the step."""
        n = self.next()
        known = self.failures[exit]
        self.failures[exit] = f"{known}{', ' if known else ''}[%c{n}, %{self.block}]"
        self.block = f"b{n}"
        return [
            f"  %c{n} = {call}",
            f"  %k{n} = icmp eq i32 %c{n}, 0",
            f"  br i1 %k{n}, label %b{n}, label %{exit}",
            f"b{n}:",
        ]

    def upload(self, name: str, shadow: str, source: str, target: str, nbytes: int, exit: str = "failed") -> list[str]:
        """A copy to the device, left out where it would change nothing."""
        return self.checked(
            f"call i32 @nova_upload(ptr {shadow}, ptr {source}, ptr {target}, i64 {nbytes}, ptr %w_cuMemcpyHtoDAsync, "
            f"ptr %stream) ; {name}",
            exit,
        )

    def stop_unless_zero(self, value: str, result: str) -> list[str]:
        """Ends the step with `result` where an i64 is not zero."""
        n = self.next()
        self._stops.append((result, self.block))
        self.block = f"b{n}"
        return [
            f"  %k{n} = icmp eq i64 {value}, 0",
            f"  br i1 %k{n}, label %b{n}, label %end",
            f"b{n}:",
        ]

    def results(self, last: str) -> str:
        found = [*self._stops, (last, self.block), (str(DRIVER_CALL), "failed")]
        found += [(str(NOT_SENT), "unsent")] if self.failures["unsent"] else []
        return ", ".join(f"[{value}, %{block}]" for value, block in found)


_TYPES = {"f64": "double", "f32": "float", "bf16": "bfloat", "f16": "half"}
_ADDED = {"f64": "1.0", "f32": "1.0"}


def _read(cell: HostCell, slot: int) -> list[str]:
    """One number from the CPU's memory into the staging block; a count moves on."""
    bits = 8 * itemsize(cell.dtype)
    kind = _TYPES.get(cell.dtype, f"i{bits}")
    n = f"_{cell.input}"
    lines = [
        f"  %hp{n} = getelementptr i8, ptr %table, i64 {8 * slot}",
        f"  %h{n} = load ptr, ptr %hp{n}",
        f"  %v{n} = load {kind}, ptr %h{n}",
        f"  %s{n} = getelementptr i8, ptr %w_staging, i64 {cell.offset}",
        f"  store {kind} %v{n}, ptr %s{n}",
    ]
    if cell.update == "count":
        add = f"fadd {kind} %v{n}, {_ADDED[cell.dtype]}" if cell.dtype in _ADDED else f"add {kind} %v{n}, 1"
        lines += [f"  %u{n} = {add}", f"  store {kind} %u{n}, ptr %h{n}"]
    return lines


def can_count(dtype: str) -> bool:
    """Whether the host can add one to a number of this type as PyTorch does."""
    return dtype in _ADDED or dtype in ("i64", "i32")


def shadow_bytes(plan: StepPlan) -> int:
    """Host memory that remembers what was copied to the device: a flag and bytes, for the scalars and each table."""
    tables = [8 + 8 * (len(i.slots) - 1) for i in plan.items if isinstance(i, KernelCall) and i.table]
    return 8 + plan.staged_bytes + sum(tables)


def _items(plan: StepPlan, table: TableLayout, writer: _Writer) -> Iterator[str]:
    shadow = 8 + plan.staged_bytes
    for number, (item, first) in enumerate(zip(plan.items, table.first_slot, strict=True)):
        argument = f"  %a{number} = getelementptr i8, ptr %table, i64 {8 * first}"
        match item:
            case KernelCall():
                yield argument
                if item.table:
                    yield f"  %t{number} = load ptr, ptr %a{number}"
                    yield f"  %m{number} = getelementptr i8, ptr %a{number}, i64 8"
                    yield f"  %h{number} = getelementptr i8, ptr %w_shadow, i64 {shadow}"
                    nbytes = 8 * (len(item.slots) - 1)
                    yield from writer.upload(f"table{number}", f"%h{number}", f"%m{number}", f"%t{number}", nbytes)
                    shadow += 8 + nbytes
                yield f"  call void @{kernel_symbol(item.kernel)}(ptr %a{number}) ; {item.symbol}"
                yield f"  %s{number} = load i64, ptr %w_status"
                yield from writer.stop_unless_zero(f"%s{number}", str(number + 1))
            case CopyBytes():
                yield argument
                yield f"  %t{number} = load ptr, ptr %a{number}"
                yield f"  %o{number} = getelementptr i8, ptr %a{number}, i64 8"
                yield f"  %u{number} = load ptr, ptr %o{number}"
                yield from writer.checked(
                    f"call i32 %w_cuMemcpyDtoDAsync(ptr %t{number}, ptr %u{number}, i64 {item.nbytes}, ptr %stream)"
                )
            case AtenCall() | BucketReady():
                yield f"  %s{number} = call i64 @{CALLBACK}(i64 {number})"
                yield from writer.stop_unless_zero(f"%s{number}", str(number + 1))


def _after(plan: StepPlan, table: TableLayout, writer: _Writer) -> Iterator[str]:
    if plan.error_slots > 1:
        nbytes = plan.error_slots * ERROR_BYTES
        yield from writer.checked(
            f"call i32 %w_cuMemcpyDtoHAsync(ptr %w_errors_host, ptr %w_errors, i64 {nbytes}, ptr %stream)"
        )
    fetched = [(c, slot) for c, slot in zip(plan.cells, table.cell_slot, strict=True) if c.update == "fetch"]
    for cell, _ in fetched:
        n = f"_{cell.input}"
        yield f"  %d{n} = getelementptr i8, ptr %w_block, i64 {cell.offset}"
        nbytes = itemsize(cell.dtype)
        yield from writer.checked(f"call i32 %w_cuMemcpyDtoHAsync(ptr %h{n}, ptr %d{n}, i64 {nbytes}, ptr %stream)")
    yield from writer.checked("call i32 %w_cuEventRecord(ptr %w_event, ptr %stream)")
    if fetched:
        yield from writer.checked("call i32 %w_cuStreamSynchronize(ptr %stream)")
