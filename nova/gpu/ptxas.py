"""ptxas and nvdisasm, where they are found: PTX to machine code, what it uses of the machine, and its instructions.

Both are optional for running (the driver assembles PTX itself); the tests use them to see registers, spills and
instructions without a GPU. They are looked for on PATH, then as the `nvidia-cuda-nvcc` and `nvidia-cuda-nvdisasm`
wheels and in CUDA installations, through cuda-pathfinder.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nova.errors import CompileError

TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Resources:
    """What one kernel uses of a multiprocessor, as ptxas reports it. Bytes, except `registers` (32-bit, a thread)."""

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0  # static only
    constant: int = 0
    barriers: int = 0

    @property
    def clean(self) -> bool:
        """Nothing went to local memory."""
        return not (self.spill_stores or self.spill_loads or self.stack)


@dataclass(frozen=True)
class Assembled:
    """A cubin, the resources of each of its kernels, and the warnings that ptxas gave."""

    cubin: bytes
    kernels: dict[str, Resources]
    warnings: tuple[str, ...] = ()


def _find(program: str) -> str | None:
    if found := shutil.which(program):
        return found
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    return find_nvidia_binary_utility(program)


@functools.cache
def find_ptxas() -> str | None:
    """Path of ptxas, or None."""
    return _find("ptxas")


@functools.cache
def find_nvdisasm() -> str | None:
    """Path of nvdisasm, or None."""
    return _find("nvdisasm")


@functools.cache
def version() -> str:
    """The version of ptxas, e.g. "V13.0.88"; "" where there is none."""
    if (ptxas := find_ptxas()) is None:
        return ""
    text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    found = re.search(r"\bV[\d.]+", text)
    return found.group() if found else text.strip()


def assemble(ptx: str, arch: str, opt_level: int = 3) -> Assembled:
    """PTX to a cubin. Raises CompileError with ptxas's message, or if there is no ptxas."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise CompileError("ptxas: not found on PATH, in a CUDA installation or as the nvidia-cuda-nvcc wheel")
    with tempfile.TemporaryDirectory(prefix="nova-ptxas-") as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [ptxas, f"-arch={arch}", f"-O{opt_level}", "-v", str(source), "-o", str(result)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
        report = run.stdout + run.stderr
        if run.returncode or not result.exists():
            raise CompileError(f"ptxas for {arch} failed ({run.returncode}):\n{report.strip()}")
        return Assembled(result.read_bytes(), parse_report(report), _warnings(report))


def _warnings(report: str) -> tuple[str, ...]:
    return tuple(line for line in report.splitlines() if "warning" in line or re.search(r"\(C7\d{3}\)", line))


def parse_report(report: str) -> dict[str, Resources]:
    """What `ptxas -v` prints, by kernel."""
    parts = re.split(r"Compiling entry function '([^']+)'", report)
    return {name: _resources(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _resources(text: str) -> Resources:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, text))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        shared=number(r"(\d+) bytes smem"),
        constant=number(r"(\d+) bytes cmem\[0\]"),
        barriers=number(r"used (\d+) barriers"),
    )


# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: `opcode` with its suffixes ("LDG.E.128.CONSTANT"), and the operands as printed."""

    opcode: str
    operands: str
    predicate: str = ""

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)


def disassemble(cubin: bytes) -> dict[str, list[Instruction]]:
    """The instructions of every kernel of a cubin. Raises CompileError without nvdisasm."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise CompileError("nvdisasm: not found on PATH or as the nvidia-cuda-nvdisasm wheel")
    handle, path = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        command = [nvdisasm, "-c", path]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    finally:
        os.unlink(path)
    if run.returncode:
        raise CompileError(f"nvdisasm failed ({run.returncode}): {run.stderr.strip()}")
    return dict(_functions(run.stdout))


def _functions(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    parts = re.split(r"^\.text\.(\w+):", text, flags=re.MULTILINE)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        yield name, [Instruction(op, rest, predicate) for predicate, op, rest in _INSTRUCTION.findall(body)]


def count(instructions: list[Instruction], prefix: str) -> int:
    """How many instructions have this opcode, or this and further suffixes: "LDG.E.128" counts LDG.E.128.CONSTANT."""
    return sum(i.opcode == prefix or i.opcode.startswith(prefix + ".") for i in instructions)


def histogram(instructions: list[Instruction]) -> Counter[str]:
    """Instructions by opcode with suffixes."""
    return Counter(i.opcode for i in instructions)
