"""One kernel from level 3 to machine code: tile program, per-thread IR, PTX, a cubin where ptxas is found, a launcher.

    func.func private @k(...) attributes {nova.kernel = "loops"}   ->   PTX, cubin, and a host object `void k(void **)`

Pure and self-contained (text in, bytes out), because it runs in worker processes and its result is cached on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nova import mlir
from nova.errors import CompileError, NovaError
from nova.gpu import fit, launcher
from nova.gpu.launcher import Launch
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.schedule.target import GpuTarget


@dataclass(frozen=True)
class GpuKernel:
    """A compiled kernel: device code, and the host object that launches it."""

    name: str
    entry: str  # symbol of `void entry(void **args)`
    object_code: bytes  # of the host
    workspace: int  # bytes of device memory, passed after the results; 0 = may be null
    llvm_ir: str = ""  # of the host
    ptx: str = ""
    cubin: bytes = b""  # empty where there is no ptxas: the driver assembles the PTX
    launches: tuple[Launch, ...] = ()
    resources: tuple[dict[str, Any], ...] = ()  # of each launch, as ptxas reports them
    smem_limit: int = 0  # bytes a block that the schedule was asked for; 0: all that the target has
    smem_reason: str = ""  # why it was asked for less (nova/gpu/fit.py)


def build(text: str, target: GpuTarget) -> GpuKernel:
    """Compiles one outlined kernel (level 1) through every level, by the largest schedule that fits the target."""
    from nova import config, pipeline

    module, stages, fitting = mlir.parse(text), pipeline.kernel_stages(target), fit.Fitting(target)
    name = kernel_name(module)
    with _naming(name):
        with mlir.context(), ir.Location.unknown(), mlir.no_collection():
            for stage in (s for s in stages if s.level < fit.FIRST_LEVEL):
                module = pipeline.run_pass(stage.name, module, target, config.knobs.verify)
            repeated = [stage for stage in stages if stage.level >= fit.FIRST_LEVEL]
            *_, (_, level5) = fitting.lower(module, repeated, config.knobs.verify)
        made = assemble(str(level5), name, target)
        return dataclasses.replace(made, smem_limit=fitting.options.limit, smem_reason=fitting.options.reason)


def compile_kernel(text: str, target: GpuTarget) -> GpuKernel:
    """Compiles the one kernel in `text` (level 3) by the schedule that it carries.

    Raises CompileError that names it for what has no code yet, or does not fit.
    """
    from nova import config, pipeline

    module = mlir.parse(text)
    name = kernel_name(module)
    with _naming(name):
        with mlir.context(), ir.Location.unknown(), mlir.no_collection():
            for stage in pipeline.kernel_stages(target):
                if stage.level > fit.FIRST_LEVEL:
                    module = pipeline.run_pass(stage.name, module, target, verify=config.knobs.verify)
        return assemble(str(module), name, target)


@contextmanager
def _naming(kernel: str) -> Iterator[None]:
    """Says of which kernel an error is."""
    try:
        yield
    except NovaError as error:
        raise type(error)(f"kernel @{kernel}: {error}") from error


def run(module: ir.Module, options: Any = None) -> str:
    """to-ptx: the assembly text of a level-5 module; `options` names the target."""
    from nova.gpu.to_ptx import to_ptx
    from nova.schedule.annotate import target_of
    from nova.schedule.target import PRESETS, GpuTarget

    target = target_of(options)
    return to_ptx(module, (target if isinstance(target, GpuTarget) else PRESETS["h100"]).arch)


def kernel_name(module: ir.Module) -> str:
    """The name of the one function that carries `nova.kernel`."""
    from nova.fusion.outline import kernel_functions

    with mlir.context():
        (function,) = kernel_functions(module)
        return ir.StringAttr(function.attributes["sym_name"]).value


def launches_of(module: ir.Module) -> tuple[list[Launch], int]:
    """The launches of a level-5 module in order, and the bytes of workspace that they share."""
    found: list[Launch] = []
    for op in module.body.operations:
        operation = op.operation
        if operation.name != "llvm.func" or "nvvm.kernel" not in operation.attributes:
            continue
        attributes = operation.attributes
        grid = [int(n) for n in ir.DenseI64ArrayAttr(attributes["nova_gpu.grid"])]
        threads = [int(n) for n in ir.DenseI32ArrayAttr(attributes["nvvm.reqntid"])]
        shared = _integer(attributes, "nova_gpu.shared")
        count = len(operation.regions[0].blocks[0].arguments)
        name = ir.StringAttr(attributes["sym_name"]).value
        if all(grid):  # (no blocks: nothing to do)
            dependent = "nova_gpu.dependent" in attributes
            found.append(Launch(name, (grid[0], grid[1], grid[2]), threads[0], shared, count, dependent))
    return found, _integer(module.operation.attributes, "nova_gpu.workspace")


def _integer(attributes: Any, name: str) -> int:
    return ir.IntegerAttr(attributes[name]).value if name in attributes else 0


def assemble(level5: str, name: str, target: GpuTarget) -> GpuKernel:
    """From per-thread IR to code for the device and for the host."""
    from nova.gpu import ptxas
    from nova.gpu.to_ptx import to_ptx
    from nova.runtime import orc

    module = mlir.parse(level5)
    with mlir.context():
        launches, workspace = launches_of(module)
    if "nvvm.kernel" not in level5:
        raise CompileError("level 5 holds no function to launch")
    for launch in launches:
        _check(launch, target)
    ptx = to_ptx(level5, target.arch)
    cubin, resources = b"", []
    if ptxas.find_ptxas() is not None:
        assembled = ptxas.assemble(ptx, target.arch)
        cubin = assembled.cubin
        resources = [dataclasses.asdict(assembled.kernels[launch.symbol]) for launch in launches]
    host = launcher.host_ir(name, launches)
    return GpuKernel(
        name, name, orc.compile_ir(host, opt=0), workspace, host, ptx, cubin, tuple(launches), tuple(resources)
    )


def _check(launch: Launch, target: GpuTarget) -> None:
    if launch.shared > target.smem_block:
        raise CompileError(
            f"{launch.symbol} wants {launch.shared:,} B of shared memory a block; {target.name} has "
            f"{target.smem_block:,} B"
        )
    if not (0 < launch.threads <= 1024 and max(launch.grid[1:]) <= 65535):
        raise CompileError(f"{launch.symbol} cannot be launched as {launch.grid} x {launch.threads}")
