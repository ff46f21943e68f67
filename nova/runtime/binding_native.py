"""The native half of argument binding, as LLVM IR.

The loop over tensors reads three words of each (Python object -> TensorImpl -> StorageImpl) at the offsets that
`tensor_layout` found, and compares class, dtype, sizes and strides with the record of the last bind.
"""

from __future__ import annotations

from nova.runtime.tensor_layout import INLINE_DIMS, TYPE, WORD, TensorLayout

# Kinds of word in a tensor's record, in order: Python class, dtype index, element size, dim, sizes, strides.
RECORD_HEAD = 4


def native_text(layout: TensorLayout) -> str:
    """The native part.

    `nova_bind(sequence, getter, count, first, binder)`: -1 - i where tensor i's metadata differs, else how many moved.
    `nova_run(binder, getter, inputs, outputs)`: binds inputs and outputs, then runs the step without the GIL; -1 where
    something must be bound in Python first, else what the step returned.
    """
    return f"""
; records, record starts, bases, relocation starts, relocations, table, number of inputs, of outputs, the step, and the
; low bits that no address may have
%binder = type {{ ptr, ptr, ptr, ptr, ptr, ptr, i64, i64, ptr, i64 }}

define i64 @nova_bind(ptr %sequence, ptr %getter, i64 %count, i64 %first, ptr %binder) {{
entry:
  %f0 = load ptr, ptr %binder
  %p1 = getelementptr %binder, ptr %binder, i32 0, i32 1
  %starts = load ptr, ptr %p1
  %p2 = getelementptr %binder, ptr %binder, i32 0, i32 2
  %bases = load ptr, ptr %p2
  %p3 = getelementptr %binder, ptr %binder, i32 0, i32 3
  %relocation_starts = load ptr, ptr %p3
  %p4 = getelementptr %binder, ptr %binder, i32 0, i32 4
  %relocations = load ptr, ptr %p4
  %p5 = getelementptr %binder, ptr %binder, i32 0, i32 5
  %table = load ptr, ptr %p5
  %p9 = getelementptr %binder, ptr %binder, i32 0, i32 9
  %mask = load i64, ptr %p9
  %none = icmp eq i64 %count, 0
  br i1 %none, label %done, label %tensor

tensor:
  %i = phi i64 [0, %entry], [%i_next, %next]
  %moves = phi i64 [0, %entry], [%moves_next, %next]
  %object = call ptr %getter(ptr %sequence, i64 %i)
  %slot = add i64 %i, %first
  %start_p = getelementptr i64, ptr %starts, i64 %slot
  %start = load i64, ptr %start_p
  %record = getelementptr i64, ptr %f0, i64 %start
  %class_p = getelementptr i8, ptr %object, i64 {TYPE}
  %class = load i64, ptr %class_p
  %want_class = load i64, ptr %record
  %same_class = icmp eq i64 %class, %want_class
  br i1 %same_class, label %geometry, label %differs

geometry:
  %impl_p = getelementptr i8, ptr %object, i64 {layout.impl}
  %impl = load ptr, ptr %impl_p
  %dtype_p = getelementptr i8, ptr %impl, i64 {layout.dtype}
  %dtype16 = load i16, ptr %dtype_p
  %dtype = zext i16 %dtype16 to i64
  %r1 = getelementptr i64, ptr %record, i64 1
  %want_dtype = load i64, ptr %r1
  %r2 = getelementptr i64, ptr %record, i64 2
  %itemsize = load i64, ptr %r2
  %r3 = getelementptr i64, ptr %record, i64 3
  %want_dim = load i64, ptr %r3
  %dim_p = getelementptr i8, ptr %impl, i64 {layout.dim}
  %dim = load i64, ptr %dim_p
  %same_dtype = icmp eq i64 %dtype, %want_dtype
  %same_dim = icmp eq i64 %dim, %want_dim
  %same_head = and i1 %same_dtype, %same_dim
  br i1 %same_head, label %place, label %differs

place:
  %inline = getelementptr i8, ptr %dim_p, i64 {WORD}
  %is_inline = icmp ule i64 %dim, {INLINE_DIMS}
  br i1 %is_inline, label %compare, label %outside

outside:
  %heap = load ptr, ptr %inline
  br label %compare

compare:
  %sizes = phi ptr [%inline, %place], [%heap, %outside]
  %stride_at = phi i64 [{INLINE_DIMS}, %place], [%dim, %outside]
  %strides = getelementptr i64, ptr %sizes, i64 %stride_at
  %want_sizes = getelementptr i64, ptr %record, i64 {RECORD_HEAD}
  %want_strides = getelementptr i64, ptr %want_sizes, i64 %dim
  %scalar = icmp eq i64 %dim, 0
  br i1 %scalar, label %pointer, label %axis

axis:
  %d = phi i64 [0, %compare], [%d_next, %axis_next]
  %size_p = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size_p
  %want_size_p = getelementptr i64, ptr %want_sizes, i64 %d
  %want_size = load i64, ptr %want_size_p
  %stride_p = getelementptr i64, ptr %strides, i64 %d
  %stride = load i64, ptr %stride_p
  %want_stride_p = getelementptr i64, ptr %want_strides, i64 %d
  %want_stride = load i64, ptr %want_stride_p
  %same_size = icmp eq i64 %size, %want_size
  %same_stride = icmp eq i64 %stride, %want_stride
  %same_axis = and i1 %same_size, %same_stride
  br i1 %same_axis, label %axis_next, label %differs

axis_next:
  %d_next = add i64 %d, 1
  %more_axes = icmp ult i64 %d_next, %dim
  br i1 %more_axes, label %axis, label %pointer

pointer:
  %storage_p = getelementptr i8, ptr %impl, i64 {layout.storage}
  %storage = load ptr, ptr %storage_p
  %data_p = getelementptr i8, ptr %storage, i64 {layout.data}
  %data = load i64, ptr %data_p
  %offset_p = getelementptr i8, ptr %impl, i64 {layout.offset}
  %offset = load i64, ptr %offset_p
  %bytes = mul i64 %offset, %itemsize
  %moved_to = add i64 %data, %bytes
  %null = icmp eq i64 %data, 0
  %now = select i1 %null, i64 0, i64 %moved_to
  %base_p = getelementptr i64, ptr %bases, i64 %slot
  %before = load i64, ptr %base_p
  %unchanged = icmp eq i64 %now, %before
  br i1 %unchanged, label %next, label %moved

moved: ; a pointer that has become null is a tensor without memory here (meta): the slow check says so
  %low_bits = and i64 %now, %mask
  %odd = icmp ne i64 %low_bits, 0
  %refused = or i1 %null, %odd
  br i1 %refused, label %differs, label %patch

patch:
  store i64 %now, ptr %base_p
  %low_p = getelementptr i64, ptr %relocation_starts, i64 %slot
  %low = load i64, ptr %low_p
  %high_p = getelementptr i64, ptr %low_p, i64 1
  %high = load i64, ptr %high_p
  %unused = icmp eq i64 %low, %high
  br i1 %unused, label %patched, label %relocate

relocate:
  %r = phi i64 [%low, %patch], [%r_next, %relocate]
  %entry_p = getelementptr {{i64, i64}}, ptr %relocations, i64 %r
  %where = load i64, ptr %entry_p
  %addend_p = getelementptr i64, ptr %entry_p, i64 1
  %addend = load i64, ptr %addend_p
  %value = add i64 %now, %addend
  %where_p = getelementptr i64, ptr %table, i64 %where
  store i64 %value, ptr %where_p
  %r_next = add i64 %r, 1
  %more = icmp ult i64 %r_next, %high
  br i1 %more, label %relocate, label %patched

patched:
  %moves_one = add i64 %moves, 1
  br label %next

next:
  %moves_next = phi i64 [%moves, %pointer], [%moves_one, %patched]
  %i_next = add i64 %i, 1
  %again = icmp ult i64 %i_next, %count
  br i1 %again, label %tensor, label %done

differs:
  %which = xor i64 %i, -1 ; -1 - i
  ret i64 %which

done:
  %result = phi i64 [0, %entry], [%moves_next, %next]
  ret i64 %result
}}

declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define i64 @nova_run(ptr %binder, ptr %getter, ptr %inputs, ptr %outputs) {{
entry:
  %count_p = getelementptr %binder, ptr %binder, i32 0, i32 6
  %count = load i64, ptr %count_p
  %fresh_p = getelementptr %binder, ptr %binder, i32 0, i32 7
  %fresh = load i64, ptr %fresh_p
  %a = call i64 @nova_bind(ptr %inputs, ptr %getter, i64 %count, i64 0, ptr %binder)
  %a_bad = icmp slt i64 %a, 0
  br i1 %a_bad, label %rebind, label %bind_outputs
bind_outputs:
  %b = call i64 @nova_bind(ptr %outputs, ptr @PyList_GetItem, i64 %fresh, i64 %count, ptr %binder)
  %b_bad = icmp slt i64 %b, 0
  br i1 %b_bad, label %rebind, label %go
rebind:
  ret i64 -1
go:
  %table_p = getelementptr %binder, ptr %binder, i32 0, i32 5
  %table = load ptr, ptr %table_p
  %step_p = getelementptr %binder, ptr %binder, i32 0, i32 8
  %step = load ptr, ptr %step_p
  %thread = call ptr @PyEval_SaveThread()
  %stopped = call i64 %step(ptr %table)
  call void @PyEval_RestoreThread(ptr %thread)
  ret i64 %stopped
}}

declare ptr @PyList_GetItem(ptr, i64)
"""
