"""NOVA_DUMP=DIR: the IR of every level of each step that is compiled, as files.

    DIR/00-train_step/00-graph.txt                        level 0, as captured
                      10-nova.mlir, 11-simplify.mlir ...  level 1, and the outlined step
                      fusion.txt                          what shares a kernel, and why not
                      kernels/<name>/20-outline-kernels.mlir ... 25-configure.mlir, 30-llvm.ll
                                     26-tile-program.mlir, 27-distribute.mlir, 31-kernel.ptx for a GPU
                      memory.txt                          the plan of the arena

Every file is written when its text is made, so that a crash in the compiler leaves what came before it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nova.config import knobs

if TYPE_CHECKING:
    from nova.pipeline import Kernel

_steps = itertools.count()  # compiled in this process


class Stages(dict[str, str]):
    """Stage -> text, each written to a file as it is set."""

    def __init__(self, folder: Path, first: int):
        super().__init__()
        self._folder, self._first = folder, first

    def __setitem__(self, stage: str, text: str) -> None:
        super().__setitem__(stage, text)
        number = self._first + list(self).index(stage)  # (a kernel's stages come again where it does not fit)
        write(self._folder / f"{number}-{stage}.mlir", text)


class StepDump:
    """The folder of one step."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stages = Stages(folder, 10)

    @classmethod
    def of(cls, name: str) -> StepDump | None:
        """The next folder in NOVA_DUMP; None if that is not set."""
        return cls(knobs.dump / f"{next(_steps):02}-{name}") if knobs.dump is not None else None

    def text(self, name: str, text: str) -> None:
        write(self.folder / name, text)

    def kernel(self, kernel: Kernel, target: Any) -> None:
        """A kernel after each of its stages. They run in workers too: here they run for their text alone."""
        from nova import pipeline

        stages = Stages(self.folder / "kernels" / kernel.name, 20)
        stages["outline-kernels"] = kernel.text
        for stage, module in pipeline.lower_kernel(kernel.text, target):
            stages[stage] = str(module)

    def code(self, kernel: Kernel) -> None:
        """What the kernel became: LLVM IR for the host, PTX for a GPU."""
        folder = self.folder / "kernels" / kernel.name
        write(folder / "30-llvm.ll", kernel.llvm_ir)
        if ptx := getattr(kernel.code, "ptx", ""):
            write(folder / "31-kernel.ptx", ptx)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text if text.endswith("\n") else text + "\n")
