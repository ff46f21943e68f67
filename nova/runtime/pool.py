"""Compiles distinct kernels in parallel worker processes, and keeps what they made.

    objects = compile_kernels(texts, target)        # cache first, then workers, then cached
    start()                                         # early: workers import MLIR while the step is captured

Workers talk over pipes (see `worker`), so the user's script needs no `if __name__ == "__main__"` guard, and nothing is
forked. They end with this process. A worker that dies is replaced and its kernel tried once more; a kernel that
kills two workers is an error that names it, never a crash here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import selectors
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nova.errors import CompileError
from nova.runtime import kernels
from nova.runtime.cache import Cache, CacheWarning, shared
from nova.runtime.kernels import LoadedKernel
from nova.runtime.key import Key, kernel_key
from nova.runtime.worker import bootstrap, builder, read_frame, split_blobs, write_frame

FEW = 8  # fewer kernels than this compile here, if MLIR is loaded anyway and no worker is ready
BUILDER = "nova.pipeline:build_kernel"  # (text, target) -> kernel object; called in the workers, or here
_ROOT = str(Path(__file__).resolve().parents[2])

Progress = Callable[[int, int], None]


def worker_count() -> int:
    """NOVA_WORKERS, else one a core, at most eight (memory: 150 MB each). 0: compile in this process."""
    setting = os.environ.get("NOVA_WORKERS", "")
    if setting.isdigit():
        return int(setting)
    return min(len(os.sched_getaffinity(0)), 8)


class Kernels(list[Any]):
    """Kernel objects in the order asked for; `compiled` counts those that no cache had."""

    compiled: int = 0


class _Worker:
    def __init__(self) -> None:
        program = bootstrap(_ROOT, [p for p in sys.path if p])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.job: int | None = None
        self.target: bytes = b""
        self.warm = False  # its imports are done

    @property
    def descriptor(self) -> int:
        return self.stdout.fileno()

    def ready(self) -> bool:
        """Whether a kernel sent now would start compiling at once."""
        if not self.warm and self.job is None and select.select([self.descriptor], [], [], 0)[0]:
            with contextlib.suppress(EOFError):
                read_frame(self.descriptor)
                self.warm = True
        return self.warm

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, job: int, text: str, target: bytes) -> None:
        if target != self.target:
            write_frame(self.stdin, {"do": "target"}, target)
            self.target = target
        write_frame(self.stdin, {"do": "compile", "builder": BUILDER}, text.encode())
        self.job = job

    def close(self) -> None:
        self.terminate()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)

    def terminate(self) -> None:
        if self.alive():
            self.process.terminate()


class Pool:
    """Up to `count` workers of the process that made it; a forked child must not use its parent's (`_pool`)."""

    def __init__(self, count: int):
        self.count = count
        self.owner = os.getpid()
        self.workers: list[_Worker] = []
        self.lock = threading.Lock()

    def start(self, count: int | None = None) -> None:
        """Brings the number of live workers up to `count`, without waiting for them to be ready."""
        wanted = self.count if count is None else min(count, self.count)
        for worker in [w for w in self.workers if not w.alive()]:
            worker.close()
            self.workers.remove(worker)
        while len(self.workers) < wanted:
            self.workers.append(_Worker())

    def ready(self) -> bool:
        """Whether any worker would start on a kernel at once."""
        with self.lock:
            return any(worker.alive() and worker.ready() for worker in self.workers)

    def run(self, texts: Sequence[str], target: bytes, done: Callable[[int, LoadedKernel], None]) -> None:
        """Compiles all texts; calls `done(index, kernel)` as each is ready. Raises at the first failure."""
        with self.lock:
            self.start(len(texts))
            try:
                self._run(texts, target, done)
            except BaseException:
                self.close()  # workers may be in the middle of something: the next call starts fresh ones
                raise

    def _run(self, texts: Sequence[str], target: bytes, done: Callable[[int, LoadedKernel], None]) -> None:
        # Longest first: the last kernel to finish should be a short one.
        waiting = deque(sorted(range(len(texts)), key=lambda i: -len(texts[i])))
        deaths = [0] * len(texts)
        left = len(texts)
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)

            def replace(worker: _Worker) -> None:
                selector.unregister(worker.stdout)
                job, worker.job = worker.job, None
                worker.close()
                self.workers.remove(worker)
                if job is not None:
                    deaths[job] += 1
                    if deaths[job] > 1:
                        raise CompileError(
                            f"the compiler process ended twice (status {worker.process.returncode}) on this kernel:\n"
                            f"{texts[job][:2000]}"
                        )
                    waiting.appendleft(job)
                fresh = _Worker()
                self.workers.append(fresh)
                selector.register(fresh.stdout, selectors.EVENT_READ, fresh)
                feed(fresh)

            def feed(worker: _Worker) -> None:
                if not waiting:
                    return
                job = waiting.popleft()
                try:
                    worker.send(job, texts[job], target)
                except OSError:  # it had died before it took the job: not the kernel's fault
                    waiting.appendleft(job)
                    worker.job = None
                    replace(worker)

            for worker in list(self.workers):
                feed(worker)
            while left:
                for event, _ in selector.select():
                    worker = event.data
                    try:
                        header, body = read_frame(worker.descriptor)
                    except EOFError:
                        replace(worker)
                        continue
                    if "ready" in header:
                        worker.warm = True
                        continue
                    job, worker.job = worker.job, None
                    assert job is not None
                    if "error" in header:
                        raise CompileError(f"{header['error']}\n{header['trace']}\nkernel:\n{texts[job][:4000]}")
                    left -= 1
                    done(job, kernels.decode(header["kernel"], split_blobs(header["blobs"], body)))
                    feed(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.close()
        self.workers.clear()


_pool_object: Pool | None = None
_pool_lock = threading.Lock()


def _pool() -> Pool:
    global _pool_object
    with _pool_lock:
        if _pool_object is None or _pool_object.owner != os.getpid():
            _pool_object = Pool(worker_count())  # after a fork the parent's workers are the parent's alone
        return _pool_object


@atexit.register
def _close() -> None:
    if _pool_object is not None and _pool_object.owner == os.getpid():
        _pool_object.close()


def _can_spawn() -> bool:
    return bool(sys.executable) and worker_count() > 0


def start() -> None:
    """Starts the workers in the background; returns at once. Without effect where there are none to start."""
    if _can_spawn():
        pool = _pool()
        with pool.lock:
            pool.start()


def compile_kernels(
    texts: Sequence[str],
    target: Any,
    progress: Progress | None = None,
    cache: Cache | None = None,
) -> Kernels:
    """Object code for each kernel text (level 1, as outlined). Equal kernels compile once, known ones not at all.

    `progress(done, total)` counts all kernels of the step. Raises CompileError where one cannot be compiled.
    """
    cache = shared() if cache is None else cache
    keys = [kernel_key(text, target) for text in texts]
    made: dict[str, LoadedKernel] = {}
    missing: dict[str, str] = {}
    for key, text in zip(keys, texts, strict=True):
        if key.digest in made or key.digest in missing:
            continue
        kernel = _cached(cache, key.digest)
        if kernel is None:
            missing[key.digest] = text
        else:
            made[key.digest] = kernel
    total = len(made) + len(missing)
    todo: list[str] = []

    def done(index: int, kernel: LoadedKernel) -> None:
        digest = todo[index]
        made[digest] = kernel
        cache.put("kernel", digest, *kernels.encode(kernel))
        if progress is not None:
            progress(len(made), total)

    if progress is not None:
        progress(len(made), total)
    if missing:
        # Another process may be compiling the same step: wait for it and take its kernels.
        with cache.lock("kernels", Key.of({"kernels": sorted(missing)}).digest) as held:
            for digest in missing:
                kernel = _cached(cache, digest) if held else None
                if kernel is None:
                    todo.append(digest)
                else:
                    made[digest] = kernel
            if todo:
                _compile([missing[digest] for digest in todo], target, done)
    result = Kernels(made[key.digest] for key in keys)
    result.compiled = len(todo)
    return result


def _cached(cache: Cache, digest: str) -> LoadedKernel | None:
    entry = cache.get("kernel", digest)
    if entry is None:
        return None
    try:
        return kernels.decode(entry.meta, entry.blobs)
    except (KeyError, TypeError, ValueError) as error:  # written by something else under our key
        warnings.warn(f"Nova cache: ignoring kernel {digest}: {error!r}; compiling again", CacheWarning, stacklevel=2)
        return None


def _compile(texts: Sequence[str], target: Any, done: Callable[[int, LoadedKernel], None]) -> None:
    if _can_spawn() and not (len(texts) < FEW and "nova.mlir" in sys.modules and not _pool().ready()):
        _pool().run(texts, pickle.dumps(target), done)
        return
    build = builder(BUILDER)
    for index, text in enumerate(texts):
        done(index, kernels.decode(*kernels.encode(build(text, target))))
