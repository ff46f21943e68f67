"""The GPU benchmarks' `run` halves on a pretended driver: a mistake there costs time on a GPU, which is scarce.

PyTorch's tensors for "cuda" are the CPU's, and a launch calls a Python function of the parameters.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class OnCpu(TorchFunctionMode):
    """device="cuda" means the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class Driver:
    """`compute(parameters)` stands for the device code; `log` holds the launches and the attributes set."""

    def __init__(self):
        self.compute = lambda words: None
        self.log = []

    def cuModuleLoadData(self, module, image):
        assert image.endswith(b"\0")
        return 0

    def cuModuleGetFunction(self, function, module, symbol):
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.log.append(("shared", attribute, value))
        return 0

    def cuLaunchKernel(self, function, gx, gy, gz, x, y, z, shared, stream, arguments, extra):
        self.log.append(("launch", gx, gy, gz, x, shared))
        self.compute([ctypes.c_uint64.from_address(address).value for address in arguments])
        return 0


@pytest.fixture
def driver(monkeypatch):
    made, real = Driver(), ctypes.CDLL
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *a, **k: made if "libcuda" in str(name) else real(name, *a, **k))
    for name in ("synchronize", "empty_cache", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator("cpu"))
    with OnCpu():
        yield made


def words_at(pointer: int, count: int, kind=ctypes.c_float) -> np.ndarray:
    return np.ctypeslib.as_array((kind * count).from_address(pointer))


def listed(folder: Path, case: str, **more) -> Path:
    """A folder that holds one kernel of two launches."""
    record = {"case": case, "file": "k.cubin", "workspace": 64, "registers": [8, 8], "spills": 0, **more}
    record["launches"] = [["first", [3, 1, 1], 32, 60000], ["second", [2, 1, 1], 64, 0]]
    (folder / "k.cubin").write_bytes(b"code")
    (folder / "kernels.json").write_text(json.dumps([record, record | {"case": "other"}]))
    return folder


def test_matmul(driver, tmp_path) -> None:
    m, n, k = 80, 48, 32

    def product(words):
        a, b, out = (words_at(p, c) for p, c in zip(words, (m * k, k * n, m * n)))
        out[:] = (a.reshape(m, k) @ b.reshape(k, n)).ravel()

    driver.compute = product
    about = {"shape": [m, n, k], "layout": "nn", "precision": "f32", "tile": [1]}
    folder, out = listed(tmp_path, "80x48x32:nn:f32", **about), tmp_path / "out.json"
    matmul = importlib.import_module("matmul_gpu")
    assert matmul.run(folder, out, rounds=2, only="80x") == 0
    (row,) = json.loads(out.read_text())
    assert row["errors"]["nova"] < 1e-6 and set(row["seconds"]) == set(row["tflops"]) == {"nova", "cublas"}
    assert ("shared", 8, 60000) in driver.log and ("shared", 8, 0) not in driver.log
    assert driver.log[-2:] == [("launch", 3, 1, 1, 32, 60000), ("launch", 2, 1, 1, 64, 0)]


def test_optimizer_on_tensors(driver, tmp_path) -> None:
    def scan(words):
        x, out = (words_at(p, 48 * 40).reshape(48, 40) for p in words[:2])
        out[:] = x.astype(np.float64).cumsum(1)

    driver.compute = scan
    folder, out = listed(tmp_path, "cumsum:48x40:1"), tmp_path / "out.json"
    optimizer = importlib.import_module("optimizer_gpu")
    assert optimizer.run(folder, out, rounds=2, only="cumsum") == 0
    (row,) = json.loads(out.read_text())["results"]
    assert set(row["seconds"]) == {"nova", "torch", "copy"} and math.isfinite(row["of_copy"] * row["ratio"])


def test_optimizer_on_lists(driver, tmp_path, monkeypatch) -> None:
    def norms(words):
        (table,) = words
        count, sizes = (int(x) for x in words_at(table, 2, ctypes.c_int64))
        pointers = words_at(table, count + 3, ctypes.c_int64)[2:]
        numel = words_at(sizes, count, ctypes.c_int64)
        values = [np.linalg.norm(words_at(int(p), int(n)).astype(np.float64)) for p, n in zip(pointers, numel)]
        words_at(int(pointers[count]), count)[:] = values

    driver.compute = norms
    optimizer = importlib.import_module("optimizer_gpu")
    for name, value in (("VOCABULARY", 64), ("WIDTH", 8), ("LAYERS", 2), ("CONTEXT", 16)):
        monkeypatch.setattr(optimizer, name, value)
    out = tmp_path / "out.json"
    assert optimizer.run(listed(tmp_path, "norm"), out, rounds=2, only="norm") == 0
    (row,) = json.loads(out.read_text())["results"]
    assert row["errors"]["nova"] < 1e-6


def test_a_case_that_leaves_an_error_has_failed(driver, tmp_path) -> None:
    def fail(words):
        words_at(words[-1], 1, ctypes.c_int64)[0] = 1

    driver.compute = fail
    out = tmp_path / "out.json"
    optimizer = importlib.import_module("optimizer_gpu")
    assert optimizer.run(listed(tmp_path, "cumsum:8x8:0"), out, rounds=1, only="cumsum") == 1
    (row,) = json.loads(out.read_text())["results"]
    assert "error record holds [1, 0]" in row["failed"]


def test_loops(driver, tmp_path) -> None:
    shape = [600, 600]
    arguments = [["f32", shape], ["i64", [4]], ["i1", [4]], ["bf16", shape]]
    folder = listed(tmp_path, "gelu:f32", kernel="gelu", arguments=arguments, bytes=600 * 600 * 6)
    loops = importlib.import_module("loops_gpu")
    loops.run(folder, tmp_path / "out.json", only="gelu", rounds=2)
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert set(row["seconds"]) == {"nova", "copy"} and row["bandwidth"] > 0


@pytest.mark.parametrize("backward", [False, True])
def test_attention(driver, monkeypatch, backward: bool) -> None:
    attention = importlib.import_module("attention_gpu")
    monkeypatch.setattr(attention, "COLD_BYTES", 1 << 10)
    launches = (("first", (1, 1, 1), 32, 0), ("second", (1, 1, 1), 32, 0))
    variant = attention.Variant((1, 2, 32, 16), "bf16", backward)
    result, size = (4, 3 * 32 * 32) if backward else (1, 32 * 32)
    driver.compute = lambda words: words_at(words[result], size, ctypes.c_uint16).fill(0)
    rows = attention.run_problem({variant: attention.Built("ptx", b"", 16, launches, "notes")}, 1)
    assert rows[0]["error"] == 1.0 and len(rows[0]["phases_us"]) == 2 and rows[0]["ms"] > 0 and rows[0]["cold_ms"] > 0
    assert any("flash" in row["name"] and row["ms"] > 0 for row in rows[1:])
    assert variant.name in attention.table(rows)


def test_running_needs_no_mlir() -> None:
    code = "import sys, matmul_gpu, optimizer_gpu, loops_gpu, attention_gpu; sys.exit('numba_cuda_mlir' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=False).returncode == 0
