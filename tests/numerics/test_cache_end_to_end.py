"""The artifact cache under faults, through `nova.jit` in processes of its own: every fault is reported, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, resource, signal, sys, warnings
import torch
import nova

if "FULL" in os.environ:  # a file can take no more bytes, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
torch.manual_seed(0)
width, lr = int(os.environ.get("WIDTH", 5)), json.loads(os.environ.get("LR", "0.1"))
w = torch.randn(3, width, requires_grad=True)
lr = torch.tensor(lr) if "TENSOR_LR" in os.environ else lr

@nova.jit
def step(x, lr):  # an optimizer would import a second's worth of PyTorch
    loss = (x @ w).ACTIVATION().square().mean()
    loss.backward()
    with torch.no_grad():
        w.sub_(w.grad * lr)
    w.grad = None
    return loss.detach()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    losses = [step(torch.randn(4, 3), lr).item() for _ in range(3)]
print(json.dumps({
    "losses": losses, "w": w.detach().flatten().tolist(), "captures": getattr(step, "captures", 0),
    "loads": getattr(step, "loads", 0), "warned": [str(m.message) for m in caught if "Nova cache" in str(m.message)],
    "mlir": any(name.startswith("numba_cuda_mlir") for name in sys.modules),
}))
"""
ROOT = Path(__file__).resolve().parents[2]


class Program:
    """Runs the step in a process; each answer is the JSON that it prints."""

    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder / "cache"

    def start(self, activation: str = "tanh", **environment: str) -> subprocess.Popen:
        path = self.folder / f"program_{activation}.py"
        path.write_text(PROGRAM.replace("ACTIVATION", activation))
        settings = {"NOVA_CACHE": str(self.cache), "NOVA_WORKERS": "0", "PYTHONPATH": str(ROOT), **environment}
        return subprocess.Popen(
            [sys.executable, str(path)], env={**os.environ, **settings},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @staticmethod
    def answer(process: subprocess.Popen) -> dict:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1])

    def run(self, activation: str = "tanh", **environment: str) -> dict:
        return self.answer(self.start(activation, **environment))

    def files(self, kind: str = "") -> list[Path]:
        return [p for p in (self.cache / kind).rglob("*") if p.is_file() and not p.name.startswith(".")]


def counts(answer: dict) -> tuple[int, int]:
    return answer["captures"], answer["loads"]


def same(answer: dict, reference: dict) -> bool:
    return answer["losses"] == reference["losses"] and answer["w"] == reference["w"]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def damage(path: Path, how: str, other: Path) -> None:
    data = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "corrupted":
            path.write_bytes(data[:-20] + bytes(b ^ 0x55 for b in data[-20:]))
        case "foreign":
            path.write_bytes(b"\x7fELF something else entirely" * 10)
        case "another key":
            path.write_bytes(other.read_bytes())


@pytest.mark.slow
def test_damaged_files_are_reported_and_made_again(program):
    cold = program.run()
    assert counts(cold) == (1, 0) and not cold["warned"]
    for faults in (
        {"capture": "truncated", "kernel": "foreign"},
        {"step": "corrupted", "kernel": "another key"},
    ):
        for kind, how in faults.items():
            assert program.files(kind)
            for path in program.files(kind):
                damage(path, how, program.files("capture")[0])
        answer = program.run()
        assert counts(answer) == (1, 0), faults
        damaged = {kind for kind in faults if any(f"/{kind}/" in text for text in answer["warned"])}
        assert damaged == {*faults}, answer["warned"]
        assert same(answer, cold), faults
    warm = program.run()
    assert counts(warm) == (0, 1) and not warm["warned"] and not warm["mlir"]
    assert same(warm, cold)


@pytest.mark.slow
def test_unlike_steps_never_share_a_capture(program):
    tanh = program.run()
    for change in ({"activation": "sigmoid"}, {"WIDTH": "6"}, {"TENSOR_LR": "1"}):
        assert counts(program.run(**change)) == (1, 0), change
    other = program.run(LR="0.5")  # a learning rate is an input: the same capture, another result
    assert counts(other) == (0, 1) and not same(other, tanh)
    eager = program.run(LR="0.5", NOVA="0")
    assert other["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert other["w"] == pytest.approx(eager["w"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_full_disk_and_unwritable_folder(program):
    full = program.run(FULL="1")
    readonly = program.run(NOVA_CACHE="/proc/nova")  # a folder in which even root can make nothing
    for answer in (full, readonly):
        assert counts(answer) == (1, 0) and same(answer, full)
        assert len(answer["warned"]) == 1 and "cannot write" in answer["warned"][0], answer["warned"]
    assert not program.files(), "a write that failed leaves nothing behind"


@pytest.mark.slow
def test_two_processes_fill_one_cache(program):
    first, second = (Program.answer(process) for process in (program.start(), program.start()))
    assert same(first, second) and not first["warned"] and not second["warned"]
    warm = program.run()
    assert counts(warm) == (0, 1) and not warm["warned"] and same(warm, first)
