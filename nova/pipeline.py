"""The whole compiler on one screen: the ordered table of stages, and what runs them.

A step descends through levels (ARCHITECTURE.md): 0 graph, 1 `nova`, 2 `linalg`, 3 scheduled, 4-6 target code. Stages
whose scope is "step" see the whole step; stages whose scope is "kernel" see one distinct kernel at a time, in worker
processes, and their result is cached by the kernel's structural hash. So compile time grows with the number of
*distinct* kernels, and with depth only through the cheap step stages.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nova.errors import CompileError, NovaError
from nova.progress import notice

if TYPE_CHECKING:
    from nova.capture.signature import CapturedStep
    from nova.config import Options
    from nova.dump import StepDump
    from nova.mlir import ir
    from nova.runtime.executable import Executable, PlannedStep
    from nova.schedule.target import Target

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Stage:
    """One pass: `run(module, options)` of `module`, which takes IR of the level before and leaves IR of `level`."""

    name: str
    level: int
    scope: Literal["step", "kernel"]
    module: str
    allows: tuple[str, ...]  # dialects that may remain afterwards
    optional: bool = False  # NOVA_DISABLE may leave it out: the step is the same without it, and slower
    device: Literal["any", "gpu"] = "any"  # the targets that it is for; a CPU's code is made from level 3 by nova.cpu


_NOVA = ("builtin", "func", "nova")
_LINALG = (*_NOVA, "arith", "linalg", "math", "tensor")
_TILE = ("arith", "builtin", "func", "math", "memref", "nova_tile", "scf", "ub", "vector")
_SIMT = ("arith", "builtin", "gpu", "llvm", "math", "nvgpu", "nvvm", "scf", "ub", "vector")

STAGES: tuple[Stage, ...] = (
    # level 1: the step as the user wrote it, then cheaper and still the same
    Stage("simplify", 1, "step", "nova.graph.simplify", _NOVA, optional=True),
    Stage("precision", 1, "step", "nova.graph.precision", _NOVA),
    Stage("remat", 1, "step", "nova.graph.remat", _NOVA, optional=True),
    # level 1 to 2: which ops share a kernel; one body for equal kernels. The loss head's tile is its contraction's
    # schedule, a pure function of shapes and target, so it is known here
    Stage("split-loss-head", 1, "step", "nova.fusion.loss_head", _NOVA, optional=True),
    Stage("form-dispatches", 1, "step", "nova.fusion.dispatch", _NOVA),
    Stage("outline-kernels", 1, "step", "nova.fusion.outline", _NOVA),
    # level 2: each distinct kernel as structured ops
    Stage("lower-attention", 2, "kernel", "nova.fusion.attention", _LINALG),
    Stage("nova-to-linalg", 2, "kernel", "nova.fusion.to_linalg", _LINALG),
    Stage("fuse-elementwise", 2, "kernel", "nova.fusion.elementwise", _LINALG),
    Stage("fold-epilogue", 2, "kernel", "nova.fusion.epilogue", _LINALG),
    # level 3: every kernel carries its schedule
    Stage("configure", 3, "kernel", "nova.schedule.annotate", _LINALG),
    # level 4: one program a block of threads, on tiles with layouts; level 5: one a thread
    Stage("tile-program", 4, "kernel", "nova.tile.generate", _TILE, device="gpu"),
    Stage("distribute", 5, "kernel", "nova.gpu.distribute", _SIMT, device="gpu"),
    # level 6: assembly text; the last stage of `python -m nova opt`
    Stage("to-ptx", 6, "kernel", "nova.gpu.compile", (), device="gpu"),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def run_pass(name: str, module: ir.Module, options: Any = None, verify: bool = True) -> ir.Module:
    """Runs one stage by name, as `python -m nova opt` and the IR tests do. Raises CompileError with the pass's name."""
    stage = BY_NAME.get(name)
    if stage is None:
        raise CompileError(f"no pass named {name!r}; passes: {', '.join(BY_NAME)}")
    try:
        module = importlib.import_module(stage.module).run(module, options) or module
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nova":
            raise
        raise CompileError(f"{name} has no code for this kernel: {error}") from error
    if verify and not isinstance(module, str):
        check_level(stage, module)
    return module


def check_level(stage: Stage, module: ir.Module) -> None:
    """The contract of a level: the IR verifies, and holds only the dialects that the stage allows."""
    if not module.operation.verify():
        raise CompileError(f"{stage.name} left IR that does not verify")
    found = {dialect for op in _walk(module.operation) if (dialect := op.name.split(".")[0]) not in stage.allows}
    if found:
        raise CompileError(f"after {stage.name} the dialects {sorted(found)} may not remain (level {stage.level})")


def _walk(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region:
            for child in block:
                yield from _walk(child.operation)


def kernel_stages(target: Any, last: int = 5) -> list[Stage]:
    """The stages that a kernel passes for a target, up to level `last`."""
    gpu = getattr(target, "is_gpu", False)
    stages = [stage for stage in STAGES if stage.scope == "kernel" and stage.level <= last]
    return [stage for stage in stages if stage.device == "any" or gpu]


def lower_kernel(text: str, options: Any, last: int = 5) -> Iterator[tuple[str, ir.Module]]:
    """Lowers one outlined kernel stage by stage, yielding (stage name, module) after each, up to level `last`.

    On a GPU the stages from `configure` on come again where a block needs more shared memory than there is.
    """
    from nova import config, mlir
    from nova.gpu import fit

    module = mlir.parse(text)
    stages, verify = kernel_stages(options, last), config.knobs.verify
    repeated = [s for s in stages if s.level >= fit.FIRST_LEVEL and getattr(options, "is_gpu", False)]
    with mlir.context(), mlir.ir.Location.unknown():
        for stage in stages[: len(stages) - len(repeated)]:
            module = run_pass(stage.name, module, options, verify)
            yield stage.name, module
        if repeated:
            yield from fit.Fitting(options).lower(module, repeated, verify)


def build_kernel(text: str, target: Target) -> Any:
    """From one outlined kernel (text, level 1) to object code. Pure: runs in worker processes, cached by its input."""
    from nova.schedule.target import CpuTarget, GpuTarget

    if isinstance(target, GpuTarget):
        from nova.gpu import compile

        return compile.build(text, target)
    from nova.cpu.compile import compile_kernel

    assert isinstance(target, CpuTarget)

    *_, (_, module) = lower_kernel(text, target)
    return compile_kernel(str(module), target)


@dataclass
class Kernel:
    """A distinct kernel of a step, as `nova.explain` shows it."""

    name: str
    kind: str
    calls: int
    text: str  # level 1, as outlined: what the kernel stages and the cache key start from
    llvm_ir: str = ""
    code: Any = None  # the compiled kernel: nova.runtime.kernels


@dataclass
class Compilation:
    """A compiled step and the record of how it came about."""

    executable: Executable | PlannedStep  # the latter where the target is another machine
    name: str
    module_text: Callable[[], str]  # the step after outlining
    kernels: list[Kernel] = field(default_factory=list)
    decisions: list[Any] = field(default_factory=list)  # fusion decisions with reasons, see nova/fusion/decisions.py
    seconds: dict[str, float] = field(default_factory=dict)  # per stage
    compiled: int = 0  # kernels compiled now; the others came from the cache


class Clock:
    """Seconds spent in each named stage, reported as progress when it begins."""

    def __init__(self, progress: Progress | None):
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self.progress:
            self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def disabled_stages() -> frozenset[str]:
    """What NOVA_DISABLE leaves out."""
    from nova import config

    named, optional = config.knobs.disabled_passes, [stage.name for stage in STAGES if stage.optional]
    if wrong := named.difference(optional):
        raise NovaError(f"NOVA_DISABLE cannot leave out {', '.join(sorted(wrong))}; it can: {', '.join(optional)}")
    return named


@dataclass(frozen=True)
class StepOptions:
    """What the step stages may depend on."""

    precision: str
    target: Target
    tf32: bool = False  # contractions on float32 may round their operands to TF32 (on a GPU)


def lower_step(
    captured: CapturedStep, target: Target, options: Options, clock: Clock, snapshots: dict[str, str] | None = None
):
    """Level 0 to the outlined step: (module, fusion decisions). `snapshots` collects the text after every stage."""
    from nova import config, mlir
    from nova.dialect import emit
    from nova.fusion import decisions, guarded

    disabled = disabled_stages()
    chosen = StepOptions(options.precision, target, target.is_gpu and captured.tf32)
    with mlir.context(), mlir.ir.Location.unknown():
        with clock.stage("emit"):
            module = emit.emit_step(captured)
        if snapshots is not None:
            snapshots["nova"] = str(module)
        with decisions.collecting() as made:
            for stage in STAGES:
                if stage.scope == "step" and stage.name not in disabled:
                    with clock.stage(stage.name):
                        module = run_pass(stage.name, module, chosen, verify=config.knobs.verify)
                    if snapshots is not None:
                        snapshots[stage.name] = str(module)
        if chosen.tf32:
            mark_tf32(module)
        if target.is_gpu:
            guarded.mark(module)
        if snapshots is not None and target.is_gpu:
            snapshots["outline-kernels"] = str(module)  # with what was marked
    return module, made


def mark_tf32(module: ir.Module) -> None:
    """Says on every kernel that holds a contraction that PyTorch allows TF32: `nova.tf32` on the function."""
    from nova.fusion import outline
    from nova.mlir import ir

    for function in outline.kernel_functions(module):
        kind = ir.StringAttr(function.attributes["nova.kernel"]).value
        if kind == "contraction" or kind.startswith("attention"):
            function.attributes["nova.tf32"] = ir.UnitAttr.get()


def refuse_fallbacks(module: ir.Module) -> None:
    """Raises UnsupportedError for the first operation of the step that would run through PyTorch."""
    from nova.dialect.base import attribute_value
    from nova.errors import UnsupportedError
    from nova.fusion import records
    from nova.runtime.read_step import source_of

    step = records.step_function(module)
    for op in step.regions[0].blocks[0].operations if step is not None else ():
        if op.operation.name == "nova.aten_call":
            name, where = attribute_value(op.operation.attributes["op"]), source_of(op.operation.location)
            raise UnsupportedError(
                f"{name} has no lowering and would run through PyTorch, which on_unsupported='error' refuses; leave "
                f"the option out to allow it\n  at {where}"
            )


def _anywhere(target: Target) -> str:
    return "cuda" if target.is_gpu else "cpu"


def _say_smaller(kernels: list[Kernel], step: str, target: Target) -> None:
    """Names the kernels that did not get the schedule that was chosen first."""
    smaller = [kernel.name for kernel in kernels if getattr(kernel.code, "smem_reason", "")]
    if smaller:
        notice(
            f"{step}: {len(smaller)} kernels would need more shared memory than {target.name} has and run by smaller "
            f"schedules ({', '.join(smaller[:3])}); nova.explain says what they need"
        )


def compile_step(
    captured: CapturedStep,
    target: Target,
    options: Options,
    progress: Progress | None = None,
    dump: StepDump | None = None,
    device: str | None = None,
) -> Compilation:
    """From a captured step to an executable. `dump` keeps the text of every level on disk. `device` is where it will
    run ("cpu", "cuda:0"); without one, a GPU's step is compiled and planned, and not linked.

    Raises CompileError for a bug in a pass, UnsupportedError when `options.on_unsupported == "error"` and something
    would run through PyTorch.
    """
    from nova.fusion import outline
    from nova.runtime import executable, placement, pool
    from nova.runtime.read_step import read_step

    clock = Clock(progress)
    if dump is not None:
        dump.text("00-graph.txt", str(captured.graph))
    module, decisions = lower_step(captured, target, options, clock, dump.stages if dump is not None else None)
    if options.on_unsupported == "error":
        refuse_fallbacks(module)
    kernels = [Kernel(k.name, k.kind, k.calls, k.text) for k in outline.kernels(module)]
    if dump is not None:
        dump.text("fusion.txt", str(decisions))
        for kernel in kernels:
            dump.kernel(kernel, target)
    with clock.stage("kernels"):
        report = (lambda done, total: progress("kernels", done, total)) if progress else None
        objects = pool.compile_kernels([k.text for k in kernels], target, report)
    for kernel, found in zip(kernels, objects, strict=True):
        kernel.llvm_ir, kernel.code = found.llvm_ir, found
    _say_smaller(kernels, captured.name, target)
    with clock.stage("link"):
        made = {k.name: o for k, o in zip(kernels, objects, strict=True)}
        symbols = {symbol: made[body] for symbol, body in outline.bodies_of(module).items()}
        runs_here = device is not None or not target.is_gpu
        graph = placement.place(read_step(module, captured.signature), captured, device or _anywhere(target))
        make = executable.link if runs_here else executable.plan_and_compile
        linked = make(graph, symbols, target=target)
    if dump is not None:
        for kernel in kernels:
            dump.code(kernel)
        if linked.memory_plan is not None:
            dump.text("memory.txt", linked.memory_plan.table(limit=1000))
    return Compilation(
        linked, captured.name, lambda: str(module), kernels, decisions, clock.seconds, objects.compiled
    )  # fmt: skip
