"""The host half of a GPU kernel: `void entry(void **args)`, which launches the kernel's phases in order.

    define void @softmax_0(ptr %args) {           ; args: the slots of the step's pointer table, as for a CPU kernel
      ...                                         ; the driver copies them at once: they are the parameter buffer itself
      %r0 = call i32 %launch(ptr %f0, i32 4096, i32 1, i32 1, i32 256, i32 1, i32 1, i32 0, ptr %stream, ...)
    }

All parameters are 8-byte device addresses, so the slots lie in memory as the driver wants a parameter buffer. Whoever
loads the object fills `@nova_launch`: the driver's functions, the cells of the stream and of the first error, and the
handle of each launch's function. After an error nothing more is launched.

A dependent launch goes through cuLaunchKernelEx with the attribute that lets it begin while the kernel before it ends:
its blocks take their places and wait there, which hides the launch itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT = "nova_launch"
_HEAD = 4  # cuLaunchKernel, cuLaunchKernelEx, stream cell, status cell
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its function, and how wide. `shared` is dynamic shared memory, in bytes."""

    symbol: str
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    parameters: int = 0  # 8-byte words
    dependent: bool = False  # waits for the launch before it by itself


# CUlaunchAttribute: an id, which is programmatic stream serialization, and a union of 64 bytes, which says yes.
_ATTRIBUTE = (
    "@serialization = private constant { i32, i32, i32, [60 x i8] } { i32 6, i32 0, i32 1, [60 x i8] zeroinitializer }"
)
# CUlaunchConfig: grid and block of three each, dynamic shared memory, stream, attributes, their number.
_CONFIG = "{ i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr, i32, i32 }"


def host_ir(entry: str, launches: Sequence[Launch]) -> str:
    """LLVM IR of the host function."""
    words = _HEAD + len(launches)
    lines = [
        f"; launches of {entry}",
        f"@{CONTEXT} = global [{words} x ptr] zeroinitializer, align 8",
        _ATTRIBUTE,
        "",
        f"define void @{entry}(ptr %args) {{",
        "entry:",
        "  %extra = alloca [5 x ptr], align 8",
        "  %size = alloca i64, align 8",
        f"  %config = alloca {_CONFIG}, align 8",
        f"  store ptr inttoptr (i64 {_BUFFER_POINTER} to ptr), ptr %extra",
    ]
    values = ("%args", f"inttoptr (i64 {_BUFFER_SIZE} to ptr)", "%size", "null")
    for position, value in enumerate(values, 1):
        lines += [f"  %x{position} = getelementptr ptr, ptr %extra, i64 {position}",
                  f"  store ptr {value}, ptr %x{position}"]  # fmt: skip
    lines += [*_load("launch", 0), *_load("launch_ex", 1), *_load("stream_cell", 2), *_load("status_cell", 3)]
    lines.append("  %stream = load ptr, ptr %stream_cell")
    for number, launch in enumerate(launches):
        lines += [
            f"  store i64 {8 * launch.parameters}, ptr %size",
            *_load(f"f{number}", _HEAD + number),
            *(_dependent if launch.dependent else _plain)(launch, number),
            f"  %z{number} = icmp eq i32 %r{number}, 0",
            f"  br i1 %z{number}, label %go{number}, label %stop",
            f"go{number}:",
        ]
    lines.append("  ret void")
    if launches:
        sources = ", ".join(f"[%r{n}, %{'entry' if n == 0 else f'go{n - 1}'}]" for n in range(len(launches)))
        lines += [
            "stop:",
            f"  %code = phi i32 {sources}",
            "  %wide = zext i32 %code to i64",
            "  store i64 %wide, ptr %status_cell",
            "  ret void",
        ]
    return "\n".join([*lines, "}", ""])


def _plain(launch: Launch, number: int) -> list[str]:
    x, y, z = launch.grid
    return [
        f"  %r{number} = call i32 %launch(ptr %f{number}, i32 {x}, i32 {y}, i32 {z}, i32 {launch.threads}, i32 1, "
        f"i32 1, i32 {launch.shared}, ptr %stream, ptr null, ptr %extra) ; {launch.symbol}"
    ]


def _dependent(launch: Launch, number: int) -> list[str]:
    values = [*launch.grid, launch.threads, 1, 1, launch.shared, 0, "%stream", "@serialization", 1, 0]
    lines = []
    for position, value in enumerate(values):
        kind = "i32" if isinstance(value, int) else "ptr"
        name = f"%l{number}_{position}"
        lines += [f"  {name} = getelementptr {_CONFIG}, ptr %config, i64 0, i32 {position}",
                  f"  store {kind} {value}, ptr {name}"]  # fmt: skip
    call = f"call i32 %launch_ex(ptr %config, ptr %f{number}, ptr null, ptr %extra)"
    return [*lines, f"  %r{number} = {call} ; {launch.symbol}"]


def _load(name: str, word: int) -> list[str]:
    return [
        f"  %{name}_p = getelementptr ptr, ptr @{CONTEXT}, i64 {word}",
        f"  %{name} = load ptr, ptr %{name}_p",
    ]


def fill(library: Any, device: Any, functions: Sequence[int]) -> None:
    """Gives a loaded launcher what it calls: `library` exports `CONTEXT`, `functions` are the launches' handles."""
    launch = [device.driver.address(name) for name in ("cuLaunchKernel", "cuLaunchKernelEx")]
    words = (*launch, ctypes.addressof(device.stream), ctypes.addressof(device.status))
    table = (ctypes.c_uint64 * (_HEAD + len(functions))).from_address(library[CONTEXT])
    table[:] = [*words, *functions]
