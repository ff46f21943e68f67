"""tile-program: a scheduled kernel becomes block-level code, one function a launch (level 3 to 4).

    func.func @k(..) {nova.kernel = "loops", lowering_config = ..}      func.func @k_0(%arg0: !llvm.ptr<1>, ..)
      linalg.generic ...                                           ->     %x = "nova_tile.load"(..)
      linalg.generic ...                                                  %m = "nova_tile.reduce"(%x) ...

A launch takes the whole table of the kernel's arguments: operands, results, workspace, error record. Each launch of a
kernel that carries `nova.guarded` begins with a guard: it does nothing once the step has found an error.
"""

from __future__ import annotations

import importlib
from typing import Any

from nova.errors import CompileError
from nova.mlir import ir
from nova.schedule.annotate import kernels, target_of
from nova.schedule.target import GpuTarget
from nova.tile.builder import module_text

# kind (the function's `nova.kernel`) -> module with `generate(func_op, target) -> (programs, workspace bytes)`
GENERATORS = {
    "loops": "nova.tile.loops",
    "contraction": "nova.tile.contraction",
    "attention_forward": "nova.tile.attention",
    "attention_backward": "nova.tile.attention",
    "scatter": "nova.tile.scatter",
    "scan": "nova.tile.scan",
    "multi_tensor": "nova.tile.multi_tensor",
    "guarded_copy": "nova.tile.guarded_copy",
}
TABLES = ("multi_tensor", "guarded_copy")  # their only argument is a table of words; they place their guards themselves
GUARDED = "nova.guarded"  # on kernels that write lifted state of a step that may find an error


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """The tile programs of the module's one kernel."""
    target = target_of(options)
    if not isinstance(target, GpuTarget):
        raise CompileError(f"tile programs are for GPUs, and the target is {target.name}")
    found = list(kernels(module.operation))
    if len(found) != 1:
        raise CompileError(f"expected one kernel in the module, got {len(found)}")
    return ir.Module.parse(generate(found[0], target))


def generate(kernel: ir.OpView, target: GpuTarget) -> str:
    """The text of a kernel's tile programs."""
    kind = ir.StringAttr(kernel.operation.attributes["nova.kernel"]).value
    if kind not in GENERATORS:
        name = ir.StringAttr(kernel.operation.attributes["sym_name"]).value
        raise CompileError(f"kernel @{name}: unknown kind {kind!r}; known: {', '.join(GENERATORS)}")
    programs, workspace = importlib.import_module(GENERATORS[kind]).generate(kernel, target)
    if GUARDED in kernel.operation.attributes and kind not in TABLES:
        for program in programs:
            program.guard_first()
    return module_text(programs, workspace)
