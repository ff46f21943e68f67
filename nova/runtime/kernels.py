"""Compiled kernels as JSON and raw bytes, for pipes between processes and for the artifact cache.

    meta, blobs = encode(kernel)       KernelObject (a CPU's), GpuKernel, or what `decode` gave
    kernel = decode(meta, blobs)       LoadedKernel or GpuKernel

What only a reader wants (LLVM IR text) may be left out with `text=False`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Kernel(Protocol):
    """What is needed of a compiled kernel: `nova.cpu.compile.KernelObject` is one, `nova.gpu.compile.GpuKernel` too."""

    @property
    def name(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def object_code(self) -> bytes: ...
    @property
    def workspace(self) -> int: ...


def identity(kernel: Kernel) -> bytes:
    """A digest of all code: kernels that have it in common are one. A name says nothing, as a cache gives a kernel the
    name that it was first compiled under; and launchers of different device code may be equal."""
    digest = hashlib.sha256()
    device_code = getattr(kernel, "cubin", b"") or getattr(kernel, "ptx", "").encode()
    for part in (kernel.entry.encode(), kernel.object_code, device_code):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel read back from a cache entry. The fields after `llvm_ir` are a GPU kernel's."""

    name: str
    entry: str
    object_code: bytes
    workspace: int
    llvm_ir: str = ""
    ptx: str = ""
    cubin: bytes = b""
    launches: tuple[Any, ...] = ()  # nova.gpu.launcher.Launch
    resources: tuple[dict[str, Any], ...] = ()
    smem_limit: int = 0
    smem_reason: str = ""


def encode(kernel: Any, text: bool = True) -> tuple[dict[str, Any], dict[str, bytes]]:
    """JSON and blobs of a kernel."""
    meta = {"name": kernel.name, "entry": kernel.entry, "workspace": kernel.workspace}
    blobs = {"object": kernel.object_code}
    if text:
        blobs["llvm"] = getattr(kernel, "llvm_ir", "").encode()
    launches = getattr(kernel, "launches", ())
    if launches:
        meta["launches"] = [dataclasses.asdict(launch) for launch in launches]
        meta["resources"] = list(kernel.resources)
        meta["smem"] = [kernel.smem_limit, kernel.smem_reason]
        blobs["cubin"] = kernel.cubin
        if text or not kernel.cubin:
            blobs["ptx"] = kernel.ptx.encode()
    return meta, blobs


def decode(meta: Mapping[str, Any], blobs: Mapping[str, bytes]) -> LoadedKernel:
    """The kernel that `encode` described."""
    launches: tuple[Any, ...] = ()
    if "launches" in meta:
        from nova.gpu.launcher import Launch

        launches = tuple(
            Launch(m["symbol"], tuple(m["grid"]), m["threads"], m["shared"], m["parameters"], m["dependent"])
            for m in meta["launches"]
        )
    return LoadedKernel(
        meta["name"], meta["entry"], blobs["object"], meta["workspace"], blobs.get("llvm", b"").decode(),
        blobs.get("ptx", b"").decode(), blobs.get("cubin", b""), launches, tuple(meta.get("resources", ())),
        *meta.get("smem", ()),
    )  # fmt: skip
