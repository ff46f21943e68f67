"""The compile pool: order, sharing, cache, failures, dead workers, forks, scripts without a main guard."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from nova.errors import CompileError
from nova.runtime import pool
from nova.runtime.cache import Cache, CacheWarning
from nova.runtime.key import kernel_key


@pytest.fixture(autouse=True)
def builder(monkeypatch):
    monkeypatch.setattr(pool, "BUILDER", "tests.numerics.runtime_builder:build")
    monkeypatch.setattr(pool, "FEW", 0)  # always in workers
    monkeypatch.setenv("NOVA_WORKERS", "2")


@pytest.fixture(autouse=True, scope="module")
def own_pool():
    before, pool._pool_object = pool._pool_object, pool.Pool(2)
    yield
    pool._pool_object.close()
    pool._pool_object = before


def compile_(*texts: str, cache: Cache | None = None, **options):
    return pool.compile_kernels(list(texts), "cpu", cache=cache or Cache(None), **options)


def fields(kernel) -> tuple[str, str, str, bool]:
    text, target, pid, torch = kernel.object_code[: len(kernel.object_code) // 3].decode().split("|")
    return text, target, pid, torch == "True"


def test_kernels_come_back_in_order_from_other_processes_without_pytorch():
    texts = [f"slow {i}" for i in range(5)]
    seen = []
    made = compile_(*texts, progress=lambda done, total: seen.append((done, total)))
    assert [fields(k)[0] for k in made] == texts and made.compiled == 5
    assert {fields(k)[1] for k in made} == {"cpu"} and not any(fields(k)[3] for k in made)
    processes = {fields(k)[2] for k in made}
    assert str(os.getpid()) not in processes and len(processes) == 2
    assert seen == [(i, 5) for i in range(6)]
    again = compile_("echo a")
    assert fields(again[0])[2] in processes  # workers stay


def test_equal_kernels_compile_once_and_cached_ones_never(tmp_path):
    cache = Cache(tmp_path)
    first = compile_("echo a", "echo b", "echo a", cache=cache)
    assert first.compiled == 2 and first[0] is first[2]
    second = compile_("echo b", "echo c", cache=Cache(tmp_path))
    assert second.compiled == 1 and second[0] == first[1]


def test_cached_kernel_that_lacks_a_part_is_reported_and_made_again(tmp_path):
    cache = Cache(tmp_path)
    cache.put("kernel", kernel_key("echo a", "cpu").digest, {"name": "of something else"})
    with pytest.warns(CacheWarning, match="ignoring kernel"):
        assert compile_("echo a", cache=cache).compiled == 1
    assert compile_("echo a", cache=Cache(tmp_path)).compiled == 0


def test_failure_names_the_reason_and_the_kernel_and_leaves_the_pool_usable():
    with pytest.raises(CompileError, match="this kernel cannot be compiled[\\s\\S]*kernel:\nfail now"):
        compile_("echo a", "fail now", "echo b")
    assert fields(compile_("echo c")[0])[0] == "echo c"


def test_killed_worker_is_replaced(tmp_path):
    made = compile_("echo a", f"die {tmp_path / 'once'}", "echo b")
    assert [fields(k)[0].split()[0] for k in made] == ["echo", "die", "echo"]
    for worker in pool._pool().workers:
        worker.process.kill()
    assert fields(compile_("echo c")[0])[0] == "echo c"


def test_kernel_that_kills_the_compiler_twice_is_an_error():
    with pytest.raises(CompileError, match="ended twice[\\s\\S]*die always"):
        compile_("echo a", "die always")


def test_what_a_compile_prints_does_not_disturb_the_protocol():
    assert fields(compile_("print hello")[0])[0] == "print hello"


def test_large_texts_and_results():
    text = "echo " + "x" * 3_000_000
    assert fields(compile_(text)[0])[0] == text


def test_in_process_without_workers(monkeypatch):
    monkeypatch.setenv("NOVA_WORKERS", "0")
    monkeypatch.setattr(pool, "_pool_object", None)
    assert fields(compile_("echo a")[0])[2] == str(os.getpid())


def test_forked_child_uses_workers_of_its_own():
    parent = fields(compile_("echo a")[0])[2]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            found = fields(compile_("echo b")[0])[2]
            os.write(write, found.encode())
            pool._pool().close()
        finally:
            os._exit(0)
    os.close(write)
    answer = os.read(read, 100).decode()
    os.waitpid(child, 0)
    os.close(read)
    assert answer and answer != parent
    assert fields(compile_("echo c")[0])[0] == "echo c"


SCRIPT = """
import sys
sys.path[:] = sys.path[1:] + sys.path[:1]  # the script's folder last: its selectors.py must not be found anywhere
print("running main", flush=True)
from nova.runtime import pool
from nova.runtime.cache import Cache
pool.BUILDER, pool.FEW = "tests.numerics.runtime_builder:build", 0
pool.start()
made = pool.compile_kernels(["echo a", "echo b"], None, cache=Cache(None))
print(len(made), *[w.process.pid for w in pool._pool().workers], flush=True)
"""


def gone(pid: int) -> bool:
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", KILLED], ids=["end", "exit", "killed"])
def test_script_without_main_guard_runs_once_and_leaves_no_process(tmp_path, ending):
    (tmp_path / "selectors.py").write_text("raise RuntimeError('a module beside the script was imported')")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + ending + "\n")
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "NOVA_WORKERS": "2"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("running main") == 1, done.stderr
    count, *pids = map(int, done.stdout.splitlines()[1].split())
    assert count == 2 and len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_worker_whose_parent_was_killed_says_nothing():
    parent = f"""
import os, subprocess, sys
from nova.runtime.worker import bootstrap
pipe = subprocess.PIPE
worker = subprocess.Popen([sys.executable, "-c", bootstrap({pool._ROOT!r}, sys.path)], stdin=pipe, stdout=pipe)
os._exit(0)
"""
    command = [sys.executable, "-c", parent]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, cwd=pool._ROOT, check=False)
    assert not done.stderr  # the worker holds it open, so all that it says is here
