"""A compiler process: reads kernels from stdin, writes object code to stdout, until stdin ends.

Started by `pool` as `python -c <bootstrap>`, never as a child that imports the user's main module. It does not
import PyTorch: an empty `nova` package with the right path takes the place of `nova/__init__.py`, and
kernel compilation needs MLIR and LLVM only.

Frames, both ways: 4 bytes of header length, 8 of body length, header (JSON), body (raw).
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import select
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

from nova.runtime import kernels

IDLE_SECONDS = 120.0  # a worker holds about 150 MB: it goes when nothing has been compiled for this long


def write_frame(stream: IO[bytes], header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(len(text).to_bytes(4, "little") + len(body).to_bytes(8, "little") + text + body)
    stream.flush()


def _exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(descriptor: int) -> tuple[dict[str, Any], bytes]:
    """One frame; EOFError where the other side has gone. Never reads ahead, so `select` stays truthful."""
    lengths = _exactly(descriptor, 12)
    header = _exactly(descriptor, int.from_bytes(lengths[:4], "little"))
    return json.loads(header), _exactly(descriptor, int.from_bytes(lengths[4:], "little"))


def split_blobs(sizes: list[list[Any]], body: bytes) -> dict[str, bytes]:
    """The named blobs that lie one after the other in the body of a reply."""
    blobs, at = {}, 0
    for name, size in sizes:
        blobs[name] = body[at : at + size]
        at += size
    return blobs


def builder(path: str) -> Callable[[str, Any], Any]:
    """The function named `package.module:function`; called with (text, target) it gives a kernel object."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _warm_up() -> None:
    """The expensive imports, before the first kernel arrives (which meets, and reports, any failure of them again)."""
    try:
        import nova.cpu.compile
        import nova.mlir
        import nova.pipeline

        nova.mlir.context()
        for stage in nova.pipeline.STAGES:
            if stage.scope == "kernel":
                importlib.import_module(stage.module)
        for module in nova.cpu.compile.EMITTERS.values():
            importlib.import_module(module)
        if os.path.exists("/dev/nvidiactl"):  # there is a GPU to compile for
            _warm_up_gpu()
    except Exception:
        pass


def _warm_up_gpu() -> None:
    import nova.gpu.compile
    import nova.gpu.distribute
    import nova.gpu.ptxas
    import nova.gpu.to_ptx
    import nova.tile.generate

    for module in {*nova.tile.generate.GENERATORS.values(), *nova.gpu.distribute.FAMILIES}:
        importlib.import_module(module)


def main() -> None:
    """Serves compile requests until nobody is left to answer."""
    try:
        _serve()
    except BrokenPipeError:  # the parent was killed, or ended without waiting: no news for the user's terminal
        os._exit(0)  # without a flush of what nobody reads


def _serve() -> None:
    """Answers every request. Everything that is printed meanwhile goes to stderr, not into the frames."""
    stdin = os.dup(0)
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    parent = os.getppid()
    target: Any = None
    idle = 0.0
    _warm_up()
    write_frame(stdout, {"ready": True})
    while True:
        ready, _, _ = select.select([stdin], [], [], 5.0)
        if not ready:
            idle += 5.0
            # A child that the user's program forked may hold our pipe open, so its end alone is no sign.
            if os.getppid() != parent or idle >= IDLE_SECONDS:
                return
            continue
        idle = 0.0
        try:
            header, body = read_frame(stdin)
        except EOFError:
            return
        try:
            if header["do"] == "target":
                target = pickle.loads(body)  # from our own parent, over its pipe
                continue
            kernel = builder(header["builder"])(body.decode(), target)
        except BaseException as error:  # travels to the parent as text
            text = f"{type(error).__name__}: {error}"
            write_frame(stdout, {"error": text, "trace": traceback.format_exc()})
            continue
        meta, blobs = kernels.encode(kernel)
        sizes = [[name, len(blob)] for name, blob in blobs.items()]
        write_frame(stdout, {"kernel": meta, "blobs": sizes}, b"".join(blobs.values()))


def bootstrap(root: str, paths: list[str]) -> str:
    """The program text of a worker: find the packages where the parent found them, without `nova/__init__.py`."""
    return (
        "import sys, types\n"
        f"sys.path[:] = sys.path + [p for p in {paths!r} if p not in sys.path]\n"
        "package = types.ModuleType('nova')\n"
        f"package.__path__ = [{os.path.join(root, 'nova')!r}]\n"
        "sys.modules['nova'] = package\n"
        "from nova.runtime.worker import main\n"
        "main()\n"
    )


if __name__ == "__main__":
    sys.exit("nova.runtime.worker is started by nova.runtime.pool")
