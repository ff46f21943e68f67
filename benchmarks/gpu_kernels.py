"""Kernels by themselves on a GPU, for scripts that time them: written as cubins with a list, loaded, launched.

Writing needs no GPU. Running needs PyTorch and the driver, and no MLIR: the machine code is there already.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nova.bench import timing

LIST = "kernels.json"
DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a block may have without asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


# --- written: on any machine ------------------------------------------------------------------------------------------


def write(compiled: Any, folder: Path, name: str) -> dict[str, Any]:
    """Puts a kernel's machine code into `folder`. Returns what `load` needs to know of it, and what ptxas said."""
    file = f"{name.replace(':', '_')}.cubin"
    (folder / file).write_bytes(compiled.cubin or compiled.ptx.encode())
    return {
        "file": file, "workspace": compiled.workspace,
        "launches": [[x.symbol, x.grid, x.threads, x.shared] for x in compiled.launches],
        "registers": [r.get("registers") for r in compiled.resources],
        "spills": sum(r.get("spill_stores", 0) for r in compiled.resources),
    }  # fmt: skip


def write_list(records: Sequence[dict[str, Any]], folder: Path) -> None:
    """The list of what lies in `folder`."""
    (folder / LIST).write_text(json.dumps(records, indent=1))


def read_list(folder: Path, only: str = "") -> Iterator[dict[str, Any]]:
    """The records of the cases that contain `only`."""
    for record in json.loads((folder / LIST).read_text()):
        if only in record["case"]:
            yield record


# --- run: on the GPU --------------------------------------------------------------------------------------------------


class Kernel:
    """A kernel in the driver, in PyTorch's context; called with tensors, it queues its launches on the current stream.

    `launches` are (symbol, grid, threads, bytes of shared memory), `image` a cubin or PTX.
    """

    def __init__(self, image: bytes, launches: Sequence[Any], workspace: int):
        torch.zeros(1, device="cuda")  # makes PyTorch's context the current one
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image + b"\0")
        self.launches = []
        for symbol, grid, threads, shared in launches:
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
            if shared > DEFAULT_SHARED:
                self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
            self.launches.append((function, grid, threads, shared))
        # filled with ones: a kernel may not count on what its workspace holds
        self.workspace = torch.full((workspace + 256,), 255, dtype=torch.uint8, device="cuda")
        self.record = torch.zeros(2, dtype=torch.int64, device="cuda")

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed: CUresult {code}")

    def launch(self, pointers: Sequence[int], only: int | None = None) -> None:
        """Every launch, or one of them, with these parameters."""
        words = [ctypes.c_uint64(pointer) for pointer in pointers]
        arguments = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for number, (function, grid, threads, shared) in enumerate(self.launches):
            if only in (None, number):
                self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, arguments, None)

    def __call__(self, *tensors: torch.Tensor, only: int | None = None) -> None:
        self.launch([t.data_ptr() for t in (*tensors, self.workspace, self.record)], only)

    def on_lists(self, numel: Sequence[int], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A call of a multi-tensor kernel, whose one parameter is a table of words in device memory."""
        sizes = torch.tensor(numel, dtype=torch.int64, device="cuda")
        words = [len(numel), *(t.data_ptr() for t in (sizes, *tensors, self.workspace, self.record))]
        table = torch.tensor(words, dtype=torch.int64, device="cuda")
        kept = (sizes, list(tensors))  # the table holds their addresses only

        def call(kept: Any = kept) -> None:
            self.launch([table.data_ptr()])

        return call

    def check(self) -> None:
        """Raises if a launch has left an error."""
        if self.record.any():
            raise RuntimeError(f"the error record holds {self.record.tolist()}")


def load(record: dict[str, Any], folder: Path) -> Kernel:
    """What `write` has written."""
    return Kernel((folder / record["file"]).read_bytes(), record["launches"], record["workspace"])


def copy_of(nbytes: float) -> Callable[[], Any]:
    """A copy that reads and writes `nbytes` together."""
    source = torch.zeros(max(1, int(nbytes) // 8), dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def medians(contestants: dict[str, Callable[[int], Any]], sets: int, rounds: int) -> dict[str, float]:
    """Median device seconds a call, contestants in turn: see `nova.bench.timing.interleave`."""
    return {name: t.median for name, t in timing.interleave(contestants, sets, rounds).items()}
