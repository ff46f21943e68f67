"""The artifact cache: round trips, damage, full and read-only folders, eviction, several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from nova.runtime import cache as caches
from nova.runtime.cache import Cache, CacheWarning

META = {"name": "k", "numbers": [1, 2]}
BLOBS = {"object": bytes(range(256)) * 10, "empty": b""}


def fresh(tmp_path) -> Cache:
    """A cache that has nothing in memory yet."""
    return Cache(tmp_path / "cache")


def test_entry_survives_the_process(tmp_path):
    assert fresh(tmp_path).get("kernel", "ab12") is None
    fresh(tmp_path).put("kernel", "ab12", META, BLOBS)
    entry = fresh(tmp_path).get("kernel", "ab12")
    assert entry is not None and entry.meta == META and entry.blobs == BLOBS
    assert fresh(tmp_path).get("step", "ab12") is None and fresh(tmp_path).get("kernel", "ab13") is None


def test_memory_serves_without_the_disk(tmp_path):
    cache = Cache(None)
    cache.put("kernel", "ab", META, BLOBS)
    assert cache.get("kernel", "ab").blobs == BLOBS
    cache.clear_memory()
    assert cache.get("kernel", "ab") is None


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[:20], lambda data: b"", lambda data: data + b"x",
    lambda data: data[:-300] + bytes([data[-300] ^ 1]) + data[-299:], lambda data: b"\x7fELF" + data[4:],
    lambda data: data[:12] + b"\xff" * 40 + data[52:],
], ids=["last byte", "header only", "empty", "longer", "flipped bit", "foreign", "header"])  # fmt: skip
def test_damaged_entry_is_reported_once_and_made_again(tmp_path, damage):
    fresh(tmp_path).put("kernel", "ab12", META, BLOBS)
    path = fresh(tmp_path).path("kernel", "ab12")
    path.write_bytes(damage(path.read_bytes()))
    cache = fresh(tmp_path)
    with pytest.warns(CacheWarning, match="compiling again"):
        assert cache.get("kernel", "ab12") is None
    assert not path.exists()
    cache.put("kernel", "ab12", META, BLOBS)
    assert fresh(tmp_path).get("kernel", "ab12").blobs == BLOBS


def test_no_flipped_bit_is_overlooked(tmp_path):
    """The names and sizes of the parts lie in the header, which the checksum must cover too."""
    fresh(tmp_path).put("kernel", "ab12", META, {"object": b"code", "text": b"words"})
    data = fresh(tmp_path).path("kernel", "ab12").read_bytes()
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(caches._Damaged):
            caches._decode("kernel", "ab12", bytes(damaged))


def test_an_unreadable_folder_is_reported_once(tmp_path):
    cache = Cache(tmp_path / ("x" * 300))
    with pytest.warns(CacheWarning, match="cannot read") as seen:
        assert cache.get("kernel", "ab12") is None and cache.get("kernel", "cd34") is None
    assert len(seen) == 1


def test_entry_of_another_key_is_not_used(tmp_path):
    fresh(tmp_path).put("kernel", "ab12", META, BLOBS)
    other = fresh(tmp_path).path("kernel", "ab99")
    other.write_bytes(fresh(tmp_path).path("kernel", "ab12").read_bytes())
    with pytest.warns(CacheWarning, match="another key"):
        assert fresh(tmp_path).get("kernel", "ab99") is None


def test_folder_that_cannot_be_written_is_reported_once(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache = fresh(tmp_path)
    with pytest.warns(CacheWarning, match="cannot write") as seen:
        for number in range(3):
            cache.put("kernel", f"ab{number}", META, BLOBS)
    assert len(seen) == 1
    assert cache.get("kernel", "ab1").blobs == BLOBS  # memory still works
    with cache.lock("kernel", "ab1") as held:
        assert not held


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path):
    fresh(tmp_path).put("kernel", "ab12", META, BLOBS)
    for folder in (tmp_path / "cache" / "kernel" / "ab", tmp_path / "cache" / "kernel", tmp_path / "cache"):
        folder.chmod(0o500)
    cache = fresh(tmp_path)
    try:
        assert cache.get("kernel", "ab12").blobs == BLOBS
        with pytest.warns(CacheWarning):
            cache.put("kernel", "cd34", META, BLOBS)
    finally:
        for folder in (tmp_path / "cache", tmp_path / "cache" / "kernel", tmp_path / "cache" / "kernel" / "ab"):
            folder.chmod(0o700)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_leaves_no_partial_entry(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(28, "No space left on device")

    cache = fresh(tmp_path)
    monkeypatch.setattr(caches.os, call, full)
    with pytest.warns(CacheWarning, match="No space left"):
        cache.put("kernel", "ab12", META, BLOBS)
    monkeypatch.undo()
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    assert cache.get("kernel", "ab12").blobs == BLOBS and fresh(tmp_path).get("kernel", "ab12") is None


def test_least_recently_used_entries_go_first(tmp_path):
    cache = Cache(tmp_path, limit=60_000, memory_limit=0)
    for number in range(10):
        cache.put("kernel", f"{number:02}", META, {"object": bytes(5000)})
        os.utime(cache.path("kernel", f"{number:02}"), (1000 + number, 1000 + number))
    cache.clear_memory()
    assert cache.get("kernel", "00") is not None  # used now, so no longer the oldest
    cache.limit = 25_000
    cache.trim()
    left = {number for number in range(10) if cache.path("kernel", f"{number:02}").exists()}
    assert 0 in left and 9 in left and 1 not in left and len(left) == 4


def test_writing_trims_in_time(tmp_path):
    cache = Cache(tmp_path, limit=100_000, memory_limit=0)
    for number in range(60):
        cache.put("kernel", f"{number:02}", META, {"object": bytes(5000)})
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= 100_000 * 17 / 16 + 6000


def test_memory_is_bounded():
    cache = Cache(None, memory_limit=10_000)
    for number in range(10):
        cache.put("kernel", str(number), META, {"object": bytes(4000)})
    assert cache.get("kernel", "9") and cache.get("kernel", "8") and cache.get("kernel", "0") is None


def test_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("NOVA_CACHE", "0")
    assert caches.default_directory() is None and caches.shared().directory is None
    monkeypatch.setenv("NOVA_CACHE", str(tmp_path))
    assert caches.shared().directory == tmp_path and caches.shared() is caches.shared()
    monkeypatch.setenv("NOVA_CACHE", "~no-such-user/x")
    assert caches.default_directory() == Path("~no-such-user/x")
    monkeypatch.delenv("NOVA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert caches.default_directory() == tmp_path / "x" / "nova"


WRITER = """
import sys, warnings
warnings.simplefilter("error")
from nova.runtime.cache import Cache
number = int(sys.argv[2])
cache = Cache(sys.argv[1], memory_limit=0)
for turn in range(40):
    cache.put("kernel", f"{turn % 4:02}", {"turn": turn}, {"object": bytes([turn % 4]) * 20000})
    entry = cache.get("kernel", f"{(turn + number) % 4:02}")
    assert entry is None or entry.blobs["object"] == bytes([(turn + number) % 4]) * 20000
"""


def test_processes_writing_the_same_entries_never_see_half_of_one(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n)]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(Cache(tmp_path).get("kernel", f"{n:02}") for n in range(4))
    assert not list(tmp_path.rglob(".write-*"))


def test_lock_lets_one_compile_and_the_others_read(tmp_path):
    made = []

    def work():
        cache = fresh(tmp_path)
        with cache.lock("step", "ab12") as held:
            assert held
            if cache.get("step", "ab12") is None:
                time.sleep(0.05)
                made.append(1)
                cache.put("step", "ab12", META, BLOBS)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_lock_gives_up_after_the_timeout(tmp_path):
    with fresh(tmp_path).lock("step", "ab12") as first, fresh(tmp_path).lock("step", "ab12", timeout=0.05) as second:
        assert first and not second
