"""The artifact cache: entries of JSON and raw bytes, in memory and on disk.

    <NOVA_CACHE or ~/.cache/nova>/<kind>/<two digits>/<digest>

File: magic, SHA-256 of all that follows, header length, header (JSON: digest, sizes), payload. Written to a temporary
file, synced, renamed: a reader sees a whole entry or none. An entry that does not check out (truncated, corrupted,
belonging to another key) is reported, removed and compiled again. No pickle. A folder that cannot be written
(read-only, full) is reported once and then done without. The oldest entries go when the total passes the limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAGIC = b"NOVA\x00\x02\n"
_HASH = 32  # bytes of a SHA-256
_LIMIT = 4 << 30  # bytes on disk
_MEMORY_LIMIT = 256 << 20  # bytes of entries held in memory
_STALE_SECONDS = 86400.0  # temporary and lock files older than this were left by a process that died


class CacheWarning(UserWarning):
    """The artifact cache is damaged or unusable; compilation goes on without it."""


@dataclass(frozen=True)
class Entry:
    meta: dict[str, Any]
    blobs: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.blobs.values()))


class _Damaged(Exception):
    """Why an entry cannot be used."""


def _encode(kind: str, digest: str, entry: Entry) -> bytes:
    payload = b"".join([json.dumps(entry.meta).encode(), *entry.blobs.values()])
    header = json.dumps({
        "kind": kind,
        "key": digest,
        "meta": len(payload) - entry.nbytes,
        "blobs": [[name, len(data)] for name, data in entry.blobs.items()],
    }).encode()  # fmt: skip
    body = b"".join([len(header).to_bytes(8, "little"), header, payload])
    return b"".join([_MAGIC, hashlib.sha256(body).digest(), body])


def _decode(kind: str, digest: str, data: bytes) -> Entry:
    if data[: len(_MAGIC)] != _MAGIC:
        raise _Damaged("not a cache entry")
    body = data[len(_MAGIC) + _HASH :]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : len(_MAGIC) + _HASH]:
        raise _Damaged("its checksum is wrong")
    at = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:at])
    if (header["kind"], header["key"]) != (kind, digest):
        raise _Damaged("it belongs to another key")
    meta = json.loads(body[at : at + header["meta"]])
    at += header["meta"]
    blobs = {}
    for name, size in header["blobs"]:
        blobs[name] = body[at : at + size]
        at += size
    return Entry(meta, blobs)


def default_directory() -> Path | None:
    """From NOVA_CACHE: a folder, or "0" for no cache on disk; else ~/.cache/nova."""
    setting = os.environ.get("NOVA_CACHE", "")
    if setting == "0":
        return None
    if setting:
        return Path(os.path.expanduser(setting))  # as a shell does, leaves the "~name" of a user there is none of
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return Path(base) / "nova"


class Cache:
    """`get`, `put` and `lock` by kind ("kernel", "step", "capture", ...) and key digest.

    Safe from several threads and processes.
    """

    def __init__(self, directory: Path | str | None = None, limit: int = _LIMIT, memory_limit: int = _MEMORY_LIMIT):
        """`directory` None: no disk. For the user's setting pass `default_directory()` or use `shared()`."""
        self.directory = None if directory is None else Path(directory)
        self.limit, self.memory_limit = limit, memory_limit
        self._memory: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._memory_bytes = 0
        self._guard = threading.Lock()
        self._writable = self._readable = self.directory is not None
        self._written = 0  # bytes since the last look at the folder's size
        self._trimmed = False
        self.hits = self.misses = 0

    # -- look-up

    def path(self, kind: str, digest: str) -> Path:
        assert self.directory is not None
        return self.directory / kind / digest[:2] / digest

    def get(self, kind: str, digest: str) -> Entry | None:
        key = (kind, digest)
        with self._guard:
            entry = self._memory.get(key)
            if entry is not None:
                self._memory.move_to_end(key)
                self.hits += 1
                return entry
        entry = self._read(kind, digest)
        with self._guard:
            self.hits += entry is not None
            self.misses += entry is None
        if entry is not None:
            self._remember(key, entry)
        return entry

    def _read(self, kind: str, digest: str) -> Entry | None:
        if self.directory is None:
            return None
        path = self.path(kind, digest)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if self._readable:  # the other entries are most likely no better: once is enough
                self._readable = False
                self._warn(f"cannot read {path}: {error.strerror or error}; what it holds is compiled again")
            return None
        try:
            entry = _decode(kind, digest, data)
        except _Damaged as reason:
            self._warn(f"ignoring {path}: {reason}; compiling again")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of last use, for eviction
        return entry

    # -- writing

    def put(self, kind: str, digest: str, meta: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None) -> Entry:
        entry = Entry(dict(meta), dict(blobs or {}))
        data = _encode(kind, digest, entry)  # raises TypeError where meta is no JSON: a bug, not a cache failure
        self._remember((kind, digest), entry)
        if self._writable:
            try:
                self._write(self.path(kind, digest), data)
                self._evict(len(data))
            except OSError as error:
                self._writable = False
                self._warn(
                    f"cannot write to {self.directory}: {error.strerror or error}; "
                    "compiled steps are not kept for other processes"
                )
        return entry

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(prefix=".write-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _remember(self, key: tuple[str, str], entry: Entry) -> None:
        with self._guard:
            old = self._memory.pop(key, None)
            self._memory_bytes += entry.nbytes - (old.nbytes if old else 0)
            self._memory[key] = entry
            while self._memory_bytes > self.memory_limit and len(self._memory) > 1:
                _, dropped = self._memory.popitem(last=False)
                self._memory_bytes -= dropped.nbytes

    # -- eviction

    def _evict(self, added: int) -> None:
        """Looks at the folder's size on the first write and after each sixteenth of the limit written."""
        with self._guard:
            self._written += added
            if self._trimmed and self._written < self.limit // 16:
                return
            self._trimmed, self._written = True, 0
        self.trim()

    def trim(self) -> None:
        """Removes the least recently used entries until the total is under the limit."""
        files: list[tuple[float, int, str]] = []
        now = time.time()
        for folder, _, names in os.walk(self.directory or ""):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    stat = os.stat(path)
                    if name.startswith((".write-", ".lock-")):
                        if now - stat.st_mtime > _STALE_SECONDS:
                            os.unlink(path)
                    else:
                        files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size

    # -- one compiler at a time

    @contextlib.contextmanager
    def lock(self, kind: str, digest: str, timeout: float = 60.0) -> Iterator[bool]:
        """Holds the right to make one entry across processes. Yields False where it could not be had in time (or
        at all): the caller then does the work anyway, which is wasteful and never wrong.

            with cache.lock(kind, digest):
                entry = cache.get(kind, digest)      # another process may have made it meanwhile
                if entry is None: ...make it, cache.put(...)
        """
        if not self._writable or self.directory is None:
            yield False
            return
        from filelock import FileLock, Timeout

        path = self.path(kind, digest)
        lock = FileLock(path.parent / f".lock-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire(timeout=timeout)
        except (OSError, Timeout, NotImplementedError):
            yield False
            return
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                lock.release()

    def _warn(self, message: str) -> None:
        warnings.warn(f"Nova cache: {message}", CacheWarning, stacklevel=4)

    # -- the whole folder

    def entries(self) -> Iterator[Path]:
        """The files that hold entries, of every kind; nothing else that the folder may hold."""
        if self.directory is None:
            return
        for path in sorted(self.directory.glob("*/??/*")):
            with contextlib.suppress(OSError):
                if path.name.startswith(path.parent.name) and path.is_file():
                    with path.open("rb") as file:
                        ours = file.read(len(_MAGIC)) == _MAGIC
                    if ours:
                        yield path

    def clear(self) -> None:
        """Deletes every entry, here and on disk."""
        self.clear_memory()
        for path in list(self.entries()):
            with contextlib.suppress(OSError):
                path.unlink()

    def describe(self) -> str:
        """Where the cache is, and the number and size of the entries of each kind."""
        if self.directory is None:
            return "no cache on disk (NOVA_CACHE=0)"
        sizes: dict[str, list[int]] = {}
        for path in self.entries():
            with contextlib.suppress(OSError):
                sizes.setdefault(path.parent.parent.name, []).append(path.stat().st_size)
        lines = [f"{kind}: {len(found)} entries, {sum(found) / 1e6:.1f} MB" for kind, found in sorted(sizes.items())]
        return "\n".join([str(self.directory), *(lines or ["empty"])])

    def clear_memory(self) -> None:
        """Forgets what this process holds; the disk stays."""
        with self._guard:
            self._memory.clear()
            self._memory_bytes = 0


_shared: Cache | None = None
_shared_setting: Path | None = None
_shared_lock = threading.Lock()


def shared() -> Cache:
    """The process's cache at the user's setting (made again when NOVA_CACHE changes)."""
    global _shared, _shared_setting
    with _shared_lock:
        setting = default_directory()
        if _shared is None or setting != _shared_setting:
            _shared, _shared_setting = Cache(setting), setting
        return _shared
