"""Attention kernels as tile programs, one launch an op of the kernel.

    %o, %l = nova.online_attention(..)               ->     @k_0: blocks of queries                attention_forward.py
    %dq = nova.online_attention_backward_query(..)   ->     @k_0: blocks of queries                attention_backward.py
    %dk, %dv = nova.online_attention_backward_key           @k_1: blocks of keys
    %dm = nova.online_attention_backward_mask               @k_2: parts of the mask's gradient     .._mask_gradient.py

Every sum is taken in an order that the tiles alone decide, and nothing is added atomically: results repeat bit for bit.
"""

from __future__ import annotations

from nova.errors import CompileError
from nova.fusion.attention_form import Attention, attention_ops, read_op
from nova.mlir import ir
from nova.schedule import config
from nova.schedule.attention import AttentionSchedule, schedule_attention
from nova.schedule.target import GpuTarget
from nova.tile.attention_backward import Key, Query
from nova.tile.attention_forward import Forward
from nova.tile.attention_mask_gradient import MaskGradient
from nova.tile.attention_statistics import Statistics, statistics_bytes
from nova.tile.attention_tiles import Tile
from nova.tile.builder import Program


def generate(kernel: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launches of a kernel function that holds attention ops, and the bytes of workspace they share."""
    name = ir.StringAttr(kernel.operation.attributes["sym_name"]).value
    arguments = len(kernel.operation.regions[0].blocks[0].arguments) + 2  # workspace, error record
    ops = [read_op(op) for op in attention_ops(kernel)]
    programs: list[Program] = []
    configured = config.read(kernel.operation, AttentionSchedule)
    for op in ops:
        schedule = configured or schedule_attention(op.problem(), target)
        if op.name == "online_attention":
            programs.append(Forward(f"{name}_{len(programs)}", op, row_tile(schedule), arguments).program())
            continue
        if not programs and op.name != "online_attention_backward_query":
            programs.append(Statistics(f"{name}_0", op, arguments).program())
        programs += _backward(op, schedule, name, len(programs), arguments)
    return programs, statistics_bytes(ops[0])


def _backward(op: Attention, schedule: AttentionSchedule, name: str, number: int, arguments: int) -> list[Program]:
    if op.name == "online_attention_backward_query":
        return [Query(f"{name}_{number}", op, row_tile(schedule), arguments).program()]
    if op.name == "online_attention_backward_mask":
        return [MaskGradient(f"{name}_{number}", op, row_tile(schedule), arguments).program()]
    if op.name != "online_attention_backward_key":
        raise CompileError(f"{op.name} has no GPU code: backward comes in two halves there")
    wanted = [tensor for tensor in ("dv", "dk") if op.has(tensor)]
    tile = key_tile(schedule)
    groups = [wanted] if schedule.key_launches == 1 else [[tensor] for tensor in wanted]
    return [Key(f"{name}_{number + i}", op, tile, arguments, tensors).program() for i, tensors in enumerate(groups)]


def row_tile(schedule: AttentionSchedule) -> Tile:
    """Blocks of queries that walk keys."""
    return Tile(
        schedule.block_queries, schedule.block_keys, schedule.threads, schedule.stages, schedule.hold, schedule.resident
    )


def key_tile(schedule: AttentionSchedule) -> Tile:
    """Blocks of keys that walk queries."""
    rows, columns, threads, stages, hold, resident = schedule.key_half
    return Tile(rows, columns, threads, stages, bool(hold), resident)
