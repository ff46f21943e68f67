"""Small kernels in LLVM IR for runtime tests: the runtime must not need the compiler's kernels to be tested."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from nova.runtime import orc


@dataclass(frozen=True)
class FakeKernel:
    name: str
    entry: str
    object_code: bytes
    workspace: int = 0


def _arguments(count: int) -> str:
    lines = []
    for i in range(count):
        lines.append(f"  %p{i} = getelementptr ptr, ptr %args, i64 {i}\n  %a{i} = load ptr, ptr %p{i}")
    return "\n".join(lines)


@cache
def elementwise(name: str, operands: int, count: int, body: str, workspace: int = 0) -> FakeKernel:
    """f32 kernel over `count` elements: `body` computes %y from %x0, %x1, ...; one result."""
    loads = "\n".join(
        f"  %q{i} = getelementptr float, ptr %a{i}, i64 %i\n  %x{i} = load float, ptr %q{i}" for i in range(operands)
    )
    text = f"""
define void @{name}(ptr %args) {{
entry:
{_arguments(operands + 1)}
  %empty = icmp eq i64 {count}, 0
  br i1 %empty, label %done, label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
{loads}
{body}
  %out = getelementptr float, ptr %a{operands}, i64 %i
  store float %y, ptr %out
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, {count}
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""
    return FakeKernel(name, name, orc.compile_ir(text), workspace)


def add(count: int) -> FakeKernel:
    return elementwise(f"add{count}", 2, count, "  %y = fadd float %x0, %x1")


def mul(count: int) -> FakeKernel:
    return elementwise(f"mul{count}", 2, count, "  %y = fmul float %x0, %x1")


def scale(count: int) -> FakeKernel:
    """y = x * s where s is a 0-d f64 scalar."""
    body = "  %s64 = load double, ptr %a1\n  %s = fptrunc double %s64 to float\n  %y = fmul float %x0, %s"
    text = f"""
define void @scale(ptr %args) {{
entry:
{_arguments(3)}
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %q0 = getelementptr float, ptr %a0, i64 %i
  %x0 = load float, ptr %q0
{body}
  %out = getelementptr float, ptr %a2, i64 %i
  store float %y, ptr %out
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, {count}
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""
    return FakeKernel("scale", "scale", orc.compile_ir(text))


def checked_copy(count: int) -> FakeKernel:
    """y = x (i64), flags the last negative element in the error slot, and the step where the slot points to its flag."""
    text = f"""
define void @checked(ptr %args) {{
entry:
{_arguments(4)}
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %step]
  %q0 = getelementptr i64, ptr %a0, i64 %i
  %x0 = load i64, ptr %q0
  %bad = icmp slt i64 %x0, 0
  br i1 %bad, label %flag, label %step
flag:
  %v = getelementptr i64, ptr %a3, i64 1
  store i64 %x0, ptr %v
  store i64 1, ptr %a3
  %linked = getelementptr ptr, ptr %a3, i64 2
  %whole = load ptr, ptr %linked
  %alone = icmp eq ptr %whole, null
  br i1 %alone, label %step, label %both
both:
  store i64 1, ptr %whole
  br label %step
step:
  %out = getelementptr i64, ptr %a1, i64 %i
  store i64 %x0, ptr %out
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, {count}
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""
    return FakeKernel("checked", "checked", orc.compile_ir(text))


def multi_tensor_double() -> FakeKernel:
    """args: n, numel[n], n operands, n results: each result is twice its operand."""
    text = """
define void @double(ptr %args) {
entry:
  %n = load i64, ptr %args
  %np = getelementptr ptr, ptr %args, i64 1
  %numel = load ptr, ptr %np
  br label %tensor
tensor:
  %t = phi i64 [0, %entry], [%t1, %tensor_done]
  %cp = getelementptr i64, ptr %numel, i64 %t
  %count = load i64, ptr %cp
  %io = add i64 %t, 2
  %ip = getelementptr ptr, ptr %args, i64 %io
  %in = load ptr, ptr %ip
  %oo = add i64 %io, %n
  %op = getelementptr ptr, ptr %args, i64 %oo
  %out = load ptr, ptr %op
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %tensor_done, label %loop
loop:
  %i = phi i64 [0, %tensor], [%i1, %loop]
  %xp = getelementptr float, ptr %in, i64 %i
  %x = load float, ptr %xp
  %y = fadd float %x, %x
  %yp = getelementptr float, ptr %out, i64 %i
  store float %y, ptr %yp
  %i1 = add i64 %i, 1
  %more = icmp ult i64 %i1, %count
  br i1 %more, label %loop, label %tensor_done
tensor_done:
  %t1 = add i64 %t, 1
  %again = icmp ult i64 %t1, %n
  br i1 %again, label %tensor, label %done
done:
  ret void
}
"""
    return FakeKernel("double", "double", orc.compile_ir(text))
