"""Schedules a kernel again, smaller, where a block of it needs more shared memory than the target has.

    configure       99 KiB a block                        configure       86 KiB
    tile-program                                     ->   tile-program
    distribute      needs 112 KiB, 13 more than there is  distribute      needs 80 KiB

A schedule's own ledger holds its tiles and pipeline stages. What later stages add to that - results staged for the
epilogue, reductions over warps, changes of layout - is known when the kernel is distributed. So the schedule is a pure
function of the target, and the target it is asked for has less memory each time, by as much as was missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nova.errors import CompileError
from nova.mlir import ir
from nova.schedule.target import GpuTarget

if TYPE_CHECKING:
    from nova.pipeline import Stage

FIRST_LEVEL = 3  # of the stages that are repeated: `configure` makes it
LEAST_LIMIT = 1024  # bytes: no schedule is smaller


@dataclass(frozen=True)
class Allowance:
    """What a schedule may use: options of the passes from `configure` on."""

    target: GpuTarget  # with the shared memory that the schedule is asked for
    reason: str = ""  # why that is less than there is; goes into the schedule's reasons

    @property
    def limit(self) -> int:
        """Bytes a block that were asked for; 0 where all of the target's are."""
        return self.target.smem_block if self.reason else 0


def allowance(target: GpuTarget, limit: int, reason: str) -> Allowance:
    """The one that a compiled kernel was made with, from what is stored of it."""
    return Allowance(dataclasses.replace(target, smem_block=limit) if limit else target, reason)


class Fitting:
    """The stages of one kernel from `configure` on, until it fits. `options`: what the last try was made with."""

    def __init__(self, target: GpuTarget):
        self.target = target
        self.options = Allowance(target)
        self._least = 0  # bytes that the smallest try needed

    def lower(self, module: ir.Module, stages: Sequence[Stage], verify: bool) -> Iterator[tuple[str, ir.Module]]:
        """(stage, module) after each stage, of every try; the last one fits.

        Raises CompileError where no schedule does. Stages that end before the kernel is distributed are run once.
        """
        before = ""
        while True:
            made, programs = module, module
            for stage in stages:
                made = self._run(stage, made, verify)
                yield stage.name, made
                if stage.level == 4:
                    programs = made
                    if before and str(made) == before:
                        break
            else:
                needed = shared_bytes(made) if stages and stages[-1].level >= 5 else 0
                if needed <= self.target.smem_block:
                    return
                self._least = min(self._least or needed, needed)
            before = str(programs)
            self._lower_limit()

    def _run(self, stage: Stage, module: ir.Module, verify: bool) -> ir.Module:
        from nova import pipeline

        try:
            return pipeline.run_pass(stage.name, module, self.options, verify)
        except CompileError as error:
            if not self.options.reason:
                raise
            raise self._nothing_fits() from error

    def _lower_limit(self) -> None:
        """The next try: less by what was missing; after the first try by a quarter at least, and never by over half."""
        limit, has = self.options.target.smem_block, self.target.smem_block
        lower = limit - min(max(self._least - has, limit // 4 if self.options.reason else 0), limit // 2)
        if lower < LEAST_LIMIT:
            raise self._nothing_fits()
        reason = (
            f"a smaller schedule, for {lower:,} B of shared memory a block: a larger one needs {self._least:,} B, and "
            f"{self.target.name} has {has:,} B"
        )
        self.options = Allowance(dataclasses.replace(self.target, smem_block=lower), reason)

    def _nothing_fits(self) -> CompileError:
        return CompileError(
            f"needs {self._least:,} B of shared memory a block in its smallest schedule; {self.target.name} has "
            f"{self.target.smem_block:,} B"
        )


def shared_bytes(module: ir.Module) -> int:
    """The most shared memory that a block of any launch of a level-5 module needs."""
    from nova.gpu.compile import launches_of

    launches, _ = launches_of(module)
    return max((launch.shared for launch in launches), default=0)
