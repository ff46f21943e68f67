"""What the census is made of: kernels with the instructions that they must become, for every architecture.

A family of kernels is a file `kernels_<family>.py` here with a list `KERNELS`; `test_kernels_census.py` assembles all of
them. A kernel must not spill or use a stack, ptxas must not warn, and every count must be met:

    Kernel("copy", lambda arch: text_of_level_5, {"LDG.E.128": 1, "STG.E.128": 1, "SHFL": (1, 8)})

A count is a number or the bounds of a range; "LDG.E" counts LDG.E.128.CONSTANT too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from nova import mlir
from nova.gpu import ptxas
from nova.gpu.to_ptx import to_ptx
from nova.mlir import ir
from nova.schedule.target import PRESETS, GpuTarget

TARGETS = {"sm_80": "a100", "sm_86": "rtx3060", "sm_89": "rtx6000ada", "sm_90a": "h100"}
ARCHS = tuple(TARGETS)
Count = int | tuple[int, int]

NEEDS_TOOLS = pytest.mark.skipif(
    ptxas.find_ptxas() is None or ptxas.find_nvdisasm() is None,
    reason="ptxas and nvdisasm are needed: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm",
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of the census. `text` makes its level-5 module for an architecture; all its launches count together."""

    name: str
    text: Callable[[str], str]
    counts: Mapping[str, Count] = field(default_factory=dict)
    archs: tuple[str, ...] = ARCHS
    registers: int = 255  # at most, in any launch
    by_arch: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)  # counts that differ


def target(arch: str) -> GpuTarget:
    """A board of the architecture."""
    return PRESETS[TARGETS[arch]]


def level5(text: str, arch: str, first: int = 1) -> str:
    """The per-thread code of a kernel given at level `first` (1: as outlined, 4: scheduled), by the pipeline's stages."""
    from nova import pipeline

    module = mlir.parse(text)
    with mlir.context(), ir.Location.unknown():
        for stage in pipeline.kernel_stages(target(arch)):
            if stage.level >= first:
                module = pipeline.run_pass(stage.name, module, target(arch))
        return str(module)


def check(kernel: Kernel, arch: str) -> None:
    """Assembles a kernel and compares it with what its entry promises."""
    text = kernel.text(arch)
    assembled = ptxas.assemble(to_ptx(text, arch), arch)
    assert not assembled.warnings, assembled.warnings
    for name, used in assembled.kernels.items():
        assert used.clean, f"{name}: {used}"
        assert used.registers <= kernel.registers, f"{name}: {used}"
    functions = ptxas.disassemble(assembled.cubin)
    for name, instructions in functions.items():
        check_order(name, instructions, "nova_gpu.dependent" in text)
    code = [i for instructions in functions.values() for i in instructions]
    wanted = {"LDL": 0, "STL": 0, **kernel.counts, **kernel.by_arch.get(arch, {})}
    found = {name: ptxas.count(code, name) for name in wanted}
    wrong = {name: (found[name], want) for name, want in wanted.items() if not _meets(found[name], want)}
    assert not wrong, f"(found, wanted): {wrong}; all: {dict(ptxas.histogram(code).most_common())}"


MEMORY = ("LD", "ST", "RED", "ATOM", "UTMA", "UBLK", "CCTL", "SYNCS")  # beginnings of opcodes
WAIT, LET_BEGIN = "ACQBULK", "PREEXIT"  # griddepcontrol.wait and .launch_dependents


def check_order(name: str, instructions: list[ptxas.Instruction], dependent: bool) -> None:
    """A launch that may begin early waits, in every thread, before it touches any memory but its parameters; and only
    then lets the next one begin, which so never runs beside a launch further back."""
    bases = [i.base for i in instructions]
    assert bases.count(WAIT) == int(dependent), f"{name} waits {bases.count(WAIT)} times"
    if not dependent:
        assert LET_BEGIN not in bases
        return
    wait = bases.index(WAIT)
    assert not instructions[wait].predicate, f"{name}: {instructions[wait]}"
    early = [i for i in instructions[:wait] if i.base.startswith(MEMORY) and not i.base.startswith("LDC")]
    early += [i for i in instructions[:wait] if i.base in (LET_BEGIN, "BRA", "EXIT", "BAR")]
    assert not early, f"{name} does not wait first: {early}"
    # What others write while a launch is under way must not be read through the cache of constants.
    assert not [i for i in instructions if i.base == "LDG" and "CONSTANT" in i.opcode]
    assert LET_BEGIN in bases, f"{name} keeps the next launch waiting"


def _meets(found: int, wanted: Count) -> bool:
    return found == wanted if isinstance(wanted, int) else wanted[0] <= found <= wanted[1]
