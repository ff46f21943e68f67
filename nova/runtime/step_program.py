"""The step program: the list of calls as one LLVM function.

    define i64 @step(ptr %table) {
      %a0 = getelementptr i8, ptr %table, i64 0        ; each call's argument pointers lie in the table, filled
      call void @kernel_3(ptr %a0)                     ; before the first call and patched only where a base moved
      %a1 = getelementptr i8, ptr %table, i64 56
      call void @kernel_0(ptr %a1)
      %r = call i64 @nova_callback(i64 0)              ; an operation left to PyTorch: nonzero stops the step
      ...
      ret i64 0                                        ; else 1 + the item that stopped it
    }

A thousand calls take about 4 us beside the kernels themselves, and 60 ms to compile (once: it is cached).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nova.runtime.step_plan import AtenCall, BucketReady, CopyBytes, KernelCall, Ref, StepPlan

CALLBACK = "nova_callback"
_WORD = 8


def kernel_symbol(index: int) -> str:
    return f"nova_kernel_{index}"


@dataclass
class TableLayout:
    """Where each item's pointers are in the table. `literals`: slot -> value; `relocations[base]`: (slot, offset)."""

    first_slot: list[int] = field(default_factory=list)
    cell_slot: list[int] = field(default_factory=list)  # of each host cell: the address of the number
    slots: int = 0
    literals: dict[int, int] = field(default_factory=dict)
    relocations: list[list[tuple[int, int]]] = field(default_factory=list)


def layout(plan: StepPlan) -> TableLayout:
    """Consecutive slots, item after item: a kernel's arguments; target and source of a copy; nothing for callbacks."""
    table = TableLayout(relocations=[[] for _ in range(plan.bases)])
    for item in plan.items:
        table.first_slot.append(table.slots)
        arguments: tuple[int | Ref, ...] = ()
        if isinstance(item, KernelCall):
            arguments = item.slots
        elif isinstance(item, CopyBytes):
            arguments = (item.target, item.source)
        for argument in arguments:
            if isinstance(argument, Ref):
                table.relocations[argument.base].append((table.slots, argument.offset))
            else:
                table.literals[table.slots] = argument
            table.slots += 1
    for cell in plan.cells:
        table.cell_slot.append(table.slots)
        table.relocations[cell.input].append((table.slots, 0))
        table.slots += 1
    return table


def _argument(name: str, slot: int) -> str:
    return f"  %{name} = getelementptr i8, ptr %table, i64 {slot * _WORD}"


def emit(plan: StepPlan) -> str:
    """LLVM IR text of the step."""
    table = layout(plan)
    lines: list[str] = []
    used: set[int] = set()
    for number, (item, first) in enumerate(zip(plan.items, table.first_slot, strict=True)):
        match item:
            case KernelCall():
                used.add(item.kernel)
                lines.append(_argument(f"a{number}", first))
                lines.append(f"  call void @{kernel_symbol(item.kernel)}(ptr %a{number}) ; {item.symbol}")
                if item.raises:
                    # The error slot is the last argument: stop before anything uses what this kernel made.
                    lines.append(_argument(f"e{number}", first + len(item.slots) - 1))
                    lines.append(f"  %f{number} = load ptr, ptr %e{number}")
                    lines.append(f"  %s{number} = load i64, ptr %f{number}")
                    lines += _stop_unless_zero(number)
            case CopyBytes():
                lines += [
                    _argument(f"t{number}", first),
                    _argument(f"u{number}", first + 1),
                    f"  %d{number} = load ptr, ptr %t{number}",
                    f"  %o{number} = load ptr, ptr %u{number}",
                    f"  %m{number} = call ptr @memmove(ptr %d{number}, ptr %o{number}, i64 {item.nbytes})",
                ]
            case AtenCall() | BucketReady():
                lines.append(f"  %s{number} = call i64 @{CALLBACK}(i64 {number})")
                lines += _stop_unless_zero(number)
    head = [f"; step {plan.name}", f"declare i64 @{CALLBACK}(i64)", "declare ptr @memmove(ptr, ptr, i64)"]
    head += [f"declare void @{kernel_symbol(k)}(ptr) nounwind" for k in sorted(used)]
    return "\n".join([*head, "", "define i64 @step(ptr %table) {", "entry:", *lines, "  ret i64 0", "}", ""])


def _stop_unless_zero(number: int) -> list[str]:
    return [
        f"  %z{number} = icmp eq i64 %s{number}, 0",
        f"  br i1 %z{number}, label %go{number}, label %stop{number}",
        f"stop{number}:",
        f"  ret i64 {number + 1}",
        f"go{number}:",
    ]


def compile_step(plan: StepPlan) -> bytes:
    """Object code of the step. Optimisation level 0: straight-line calls have nothing to optimise."""
    from nova.runtime import device_program, orc

    return orc.compile_ir(emit(plan) if plan.device == "cpu" else device_program.emit(plan), opt=0)
