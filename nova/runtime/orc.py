"""ORC: object code in, function addresses out, through llvmlite's LLJIT.

One LLJIT a process. Each object becomes its own library, so entry names never clash; a library is unloaded
when its `Library` object is dropped. The OpenMP entry points come from the runtime that PyTorch has already
loaded: one thread pool in the process, sized by `torch.set_num_threads`.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import llvmlite.binding as llvm

OPENMP_SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")

_lock = threading.RLock()
_counter = itertools.count()


@cache
def target_machine(opt: int = 2) -> Any:
    """A target machine for this CPU with all of its features."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=opt, jit=True)


@cache
def _engine() -> Any:
    target_machine()  # initialises LLVM
    # JITLink lays each object out in one block with its own stubs: code and data are always in reach.
    return llvm.create_lljit_compiler(use_jit_link=True)


def openmp_library_paths() -> list[str]:
    """OpenMP runtimes mapped into this process, PyTorch's own first."""
    paths: list[str] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[5].strip() if line.count("/") else ""
            if re.search(r"/lib(gomp|omp|iomp5)\b[^/]*\.so", path) and path not in paths:
                paths.append(path)
    return sorted(paths, key=lambda path: ("torch" not in path, "gomp" not in path))


@cache
def openmp_symbols() -> dict[str, int]:
    """Addresses of the OpenMP entry points; imports PyTorch so that its runtime is the one that is found."""
    import torch  # noqa: F401  (loads libgomp)

    for path in openmp_library_paths():
        library = ctypes.CDLL(path)
        try:
            return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in OPENMP_SYMBOLS}
        except AttributeError:
            continue  # an OpenMP without the GNU entry points
    raise ImportError("Nova needs the OpenMP runtime that PyTorch loads (libgomp), and found none in this process")


class Library:
    """Loaded code. The addresses are valid while this object lives."""

    def __init__(self, tracker: Any, names: tuple[str, ...], keep: tuple[object, ...]):
        self._tracker = tracker
        self._keep = keep  # the engine, and whatever the code's imports point into
        self.addresses: dict[str, int] = {name: tracker[name] for name in names}

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]

    def __del__(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None and not _engine().closed:
            with _lock:
                tracker.close()


def load(
    objects: bytes | Iterable[bytes],
    exports: Iterable[str],
    imports: Mapping[str, int] | None = None,
    keep: Iterable[object] = (),
) -> Library:
    """Links object code and returns its exported functions.

    Undefined symbols resolve to `imports`, then to OpenMP, then to the process (libc, libm).
    """
    names = tuple(dict.fromkeys(exports))
    builder = llvm.JITLibraryBuilder()
    for code in [objects] if isinstance(objects, bytes) else objects:
        builder.add_object_img(code)
    builder.add_current_process()
    for name, address in {**openmp_symbols(), **(imports or {})}.items():
        builder.import_symbol(name, address)
    for name in names:
        builder.export_symbol(name)
    with _lock:
        engine = _engine()
        tracker = builder.link(engine, f"nova.{next(_counter)}")
    return Library(tracker, names, (engine, *keep))


def compile_ir(text: str, opt: int = 2) -> bytes:
    """LLVM IR text to object code for this CPU. No IR pipeline: code generation alone is enough here."""
    with _lock:
        module = llvm.parse_assembly(text)
        module.verify()
        return target_machine(opt).emit_object(module)
