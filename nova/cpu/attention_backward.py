"""Attention backward: dq, dk, dv (one pass or two halves) and the gradient of an additive mask.

Probabilities are recomputed from the saved log-sum-exp, tile by tile, and delta = rowsum(dout * out) once a query. A
task owns a range of key blocks and of query panels, and the loop nest is the same for every op:

    for query head of the key head:                     whole: all of them      query half: one     key half: all
      for group of query panels:                        all                     one                 all
        pack q, dout (transposed and not), delta
        for key block:                                  all                     all                 one
          for panel: scores, dout V^T, gradient of the scores;  dq += K^T ds
          dv += P^T dout, dk += ds^T q                  over the group's panels
        write dq
    write dk, dv

The order of every sum depends on the tiles alone, so results don't depend on threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nova.cpu import attention_mask as masks
from nova.cpu import attention_pack as pack
from nova.cpu import attention_softmax as softmax
from nova.cpu.attention import Body, Work
from nova.cpu.attention_forward import element_index
from nova.cpu.attention_softmax import GradientOptions
from nova.cpu.attention_tiles import Scope, emit_outer, emit_scores, emit_weighted, padded_rows
from nova.cpu.parallel import Phase, Region, Slot
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value

Index: TypeAlias = "Value | int"


@dataclass(frozen=True)
class Range:
    """What one task covers. Blocks are key blocks, groups are groups of query panels, heads are query heads."""

    b: Index
    kv_head: Index
    first_head: Index
    heads: int
    first_group: Index
    groups: int
    first_block: Index
    blocks: int


class Emitter:
    """One backward op: its scratch layout and the loop nest over it."""

    def __init__(self, work: Work):
        op, g, schedule = work.op, work.geometry, work.schedule
        self.work, self.op, self.g, self.kit = work, op, g, work.kit
        self.block, self.size = schedule.block_keys, schedule.panels
        self.blocks, self.groups = max(-(-op.keys // self.block), 1), -(-work.panels() // self.size)
        self.query, self.key = op.has("dq"), op.has("dk") or op.has("dv")
        self.mask = op.has("dmask")
        whole_rows = op.name in ("online_attention_backward", "online_attention_backward_query")
        self.task_blocks = self.blocks if whole_rows else 1
        self.key_pitch, self.value_pitch = g.row_pitch(op.dim), g.row_pitch(op.value_dim)
        self.query_rows = padded_rows(op.dim, g.rows)
        self.options = GradientOptions(op.causal, op.dropout is not None, op.has_floor)
        self.slots = self._slots()

    def _slots(self) -> dict[str, Slot]:
        op, g, scratch = self.op, self.g, self.work.scratch
        rows, queries = self.task_blocks * self.block, self.size * g.queries
        slots = {
            "k": scratch(rows * self.key_pitch + g.rows),
            "v": scratch(rows * self.value_pitch),
            "q_lanes": scratch(op.dim * queries),
            "dout_lanes": scratch(op.value_dim * queries),
            "base": scratch(queries),
            "delta": scratch(queries),
            "scores": scratch(self.block * queries),
            "products": scratch(self.block * queries),
            "unit": scratch(g.queries),
        }
        if self.query:
            slots["dq"] = scratch(self.query_rows * queries)
        if self.key:
            width = [-(-d // g.lanes) * g.lanes for d in (op.dim, op.value_dim)]
            slots |= {"q_columns": scratch(queries * width[0]), "dout_columns": scratch(queries * width[1])}
            slots |= {"dk": scratch(rows * self.key_pitch), "dv": scratch(rows * self.value_pitch)}
        if op.has_floor:
            slots["lift"] = scratch(queries)
        if op.dropout:
            slots["keep"] = scratch(self.block * g.queries)
        if self.mask:
            slots["dmask"] = scratch(self._mask_panels() * self._mask_rows() * g.queries)
        return slots

    def phase(self) -> Phase:
        op, schedule = self.op, self.work.schedule
        if self.mask:
            return self._mask_phase()
        name = op.name.removeprefix("online_attention_backward")
        sizes = {
            "": (op.batch, op.kv_heads),
            "_query": (op.batch, op.heads, self.groups),
            "_key": (op.batch, op.kv_heads, self.blocks),
        }[name]
        tasks = 1
        for size in sizes:
            tasks *= size

        def emit(region: Region) -> None:
            self.start(region)
            s = self.s
            with region.tasks() as task:
                b, h, *rest = self.body.unflatten(task, sizes)
                part = rest[0] if rest else 0
                if name == "_query":
                    kv_head = h if op.group == 1 or isinstance(h, int) else ln.divui(h, s.i(op.group))
                    self.emit_range(Range(b, kv_head, h, 1, part, 1, 0, self.blocks))
                else:
                    blocks = self.blocks if name == "" else 1
                    self.emit_range(Range(b, h, s.mul(h, op.group), op.group, 0, self.groups, part, blocks))

        return Phase(tasks, schedule.threads, emit, cyclic=op.causal and name != "")

    def start(self, region: Region) -> None:
        self.body = Body(self.work, region)
        self.s: Scope = self.body.scope
        self.at = {name: self.body.scratch(slot) for name, slot in self.slots.items()}
        self.factor = self.s.s(self.op.factor)
        for half in range(2):
            self.s.store(self.s.v(1.0), self.at["unit"], half * self.g.lanes)

    # --- the nest ----------------------------------------------------------------------------------------------------

    def emit_range(self, range_: Range) -> None:
        s, op = self.s, self.op
        k0 = s.mul(range_.first_block, self.block)
        count = s.min(s.sub(op.keys, k0), range_.blocks * self.block)
        self.pack_keys(range_.b, range_.kv_head, k0, count)
        if self.key:
            for name, pitch in (("dk", self.key_pitch), ("dv", self.value_pitch)):
                self.clear(self.at[name], s.mul(s.round_up(count, self.g.row_unit), pitch))
        with s.loop(0, range_.heads) as offset:
            h = s.add(range_.first_head, 0 if range_.heads == 1 else offset)
            first: Index = range_.first_group
            if op.causal and range_.groups > 1:  # groups that end before the first key see nothing
                first = s.max(first, ln.divui(s.i64(k0), s.i(self.size * self.g.queries)))
            with s.loop(first, s.add(range_.first_group, range_.groups)) as group:
                self.emit_group(range_.b, h, s.mul(group, self.size), k0, count)
        if self.key:
            self.write_keys(range_.b, range_.kv_head, k0, count)

    def emit_group(self, b: Index, h: Index, first_panel: Index, k0: Index, count: Index) -> None:
        """All key blocks of the task for one group of query panels of one head."""
        s, g, op = self.s, self.g, self.op
        panels = s.min(s.sub(self.work.panels(), first_panel), self.size)
        q_first = s.mul(first_panel, g.queries)
        self.pack_queries(b, h, q_first, panels)
        if self.query:
            self.clear(self.at["dq"], s.mul(panels, self.query_rows * g.queries))
        end = count
        if op.causal:
            end = s.min(count, s.sub(s.add(q_first, s.mul(panels, g.queries)), k0))
        with s.loop(0, end, self.block) as k_local:
            rows = s.min(s.sub(end, k_local), self.block)
            k = s.add(k0, k_local)
            with s.loop(0, panels) as p:
                self.emit_panel(b, h, p, s.add(q_first, s.mul(p, g.queries)), k, k_local, rows)
            if self.key:
                self.emit_outer(k_local, rows, panels, s.sub(k, q_first) if op.causal else None)
        if self.query:
            self.write_queries(b, h, q_first, panels)

    def emit_panel(self, b: Index, h: Index, p: Index, q0: Index, k0: Index, k_local: Index, rows: Index) -> None:
        s, g, op = self.s, self.g, self.op
        shift = s.sub(q0, k0) if op.causal else None
        if shift is not None:
            rows = s.min(rows, s.add(shift, g.queries))
        with s.when("sgt", rows, 0):
            self.emit_scores(b, h, p, q0, k0, k_local, s.i64(rows), shift)
            if self.query:
                keys = s.at(self.at["k"], s.mul(k_local, self.key_pitch))
                target = s.at(self.at["dq"], s.mul(p, self.query_rows * g.queries))
                self.kit.call(
                    "weighted", [keys, self.tile("products", p), target, s.i64(s.round_up(rows, 4))],
                    lambda s, *args: emit_weighted(s, *args, dim=op.dim, pitch=self.key_pitch),
                )  # fmt: skip

    def emit_scores(
        self, b: Index, h: Index, p: Index, q0: Index, k0: Index, k_local: Index, rows: Value, shift: Index | None
    ) -> None:
        """The panel's probabilities and score gradients, in its `scores` and `products` tiles."""
        s, g, op, kit = self.s, self.g, self.op, self.kit
        operands = (
            ("k", "q_lanes", "scores", self.factor, op.dim, self.key_pitch),
            ("v", "dout_lanes", "products", s.s(1.0), op.value_dim, self.value_pitch),
        )
        for block, lanes, tile, factor, dim, pitch in operands:
            rows_at = s.at(self.at[block], s.mul(k_local, pitch))
            panel = s.at(self.at[lanes], s.mul(p, dim * g.queries))
            kit.call(
                f"scores_{dim}", [rows_at, panel, self.tile(tile, p), rows, factor],
                lambda s, *args, dim=dim, pitch=pitch: emit_scores(s, *args, dim=dim, pitch=pitch),
            )  # fmt: skip
        scores, products = self.tile("scores", p), self.tile("products", p)
        if op.mask:
            access = op["mask"]
            lanes = s.i64(s.min(s.sub(op.queries, q0), g.queries))
            start = access.start(s, b, h, q0, k0)
            masks.apply_mask(kit, op.mask, self.body.pointer(access), start, lanes, scores, rows)
        keep = None
        if op.dropout:
            keep = self.at["keep"]
            element = element_index(s, op, b, h, q0, k0)
            masks.keep_tile(kit, op.dropout, self.body.pointer(op["seed"]), element, keep, rows)
        place = s.mul(p, g.queries)
        lift = s.at(self.at["lift"], place) if op.has_floor else None
        base, delta = s.at(self.at["base"], place), s.at(self.at["delta"], place)
        softmax.gradient_step(
            kit, self.options, scores, products, base, delta, rows, None if shift is None else s.i64(shift), keep, lift
        )

    def emit_outer(self, k_local: Index, rows: Index, panels: Index, shift: Index | None) -> None:
        """dk and dv of one key block, over all panels of the group."""
        s, op, g = self.s, self.op, self.g
        for name, tile, columns, dim, pitch in (
            ("dv", "scores", "dout_columns", op.value_dim, self.value_pitch),
            ("dk", "products", "q_columns", op.dim, self.key_pitch),
        ):
            target = s.at(self.at[name], s.mul(k_local, pitch))
            args = [self.at[tile], self.at[columns], target, s.i64(rows), s.i64(panels)]
            self.kit.call(
                f"outer_{dim}", args + ([s.i64(shift)] if shift is not None else []),
                lambda s, *args, dim=dim, pitch=pitch: emit_outer(
                    s, *args, dim=dim, pitch=pitch, tile_rows=self.block, panel_rows=self.size * g.queries
                ),
            )  # fmt: skip

    def tile(self, name: str, p: Index) -> Value:
        return self.s.at(self.at[name], self.s.mul(p, self.block * self.g.queries))

    # --- memory ------------------------------------------------------------------------------------------------------

    def clear(self, target: Value, elements: Index) -> None:
        """Zeroes `elements`, a multiple of the vector's lanes."""

        def body(s: Scope, target: Value, elements: Value) -> None:
            with s.loop(0, elements, s.geometry.lanes) as i:
                s.store(s.v(0.0), target, i)

        self.kit.call("clear", [target, self.s.i64(elements)], body)

    def pack_keys(self, b: Index, kv_head: Index, k0: Index, count: Index) -> None:
        s, op = self.s, self.op
        padded = s.i64(s.round_up(count, self.g.row_unit))
        for name, pitch, columns in (("k", self.key_pitch, op.dim), ("v", self.value_pitch, op.value_dim)):
            access = op[name]
            start = access.start(s, b, kv_head, k0)
            pack.pack_rows(
                self.kit, access.matrix(columns), self.body.pointer(access), start, s.i64(count), padded, self.at[name],
                pitch,
            )  # fmt: skip

    def pack_queries(self, b: Index, h: Index, q_first: Index, panels: Index) -> None:
        s, g, op, kit = self.s, self.g, self.op, self.kit
        total = s.i64(s.mul(panels, g.queries))
        valid = s.i64(s.min(s.sub(op.queries, q_first), total))
        for name, dim in (("q", op.dim), ("dout", op.value_dim)):
            access = op[name]
            source, matrix = self.body.pointer(access), access.matrix(dim)
            if self.key:
                start = access.start(s, b, h, q_first)
                pack.pack_columns(
                    kit, matrix, source, start, valid, total, self.at[f"{name}_columns"], self.size * g.queries
                )
            with s.loop(0, panels) as p:
                q0 = s.add(q_first, s.mul(p, g.queries))
                rows = s.i64(s.min(s.sub(op.queries, q0), g.queries))
                target = s.at(self.at[f"{name}_lanes"], s.mul(p, dim * g.queries))
                pack.pack_lanes(kit, matrix, source, access.start(s, b, h, q0), rows, target)
        dout, out, lse = op["dout"], op["out"], op["lse"]
        with s.loop(0, panels) as p:
            q0, place = s.add(q_first, s.mul(p, g.queries)), s.mul(p, g.queries)
            rows = s.i64(s.min(s.sub(op.queries, q0), g.queries))
            pack.row_products(
                kit, dout.matrix(op.value_dim), out.matrix(op.value_dim), self.body.pointer(dout),
                dout.start(s, b, h, q0), self.body.pointer(out), out.start(s, b, h, q0), rows,
                s.at(self.at["delta"], place),
            )  # fmt: skip
            softmax.load_statistics(
                kit, lse.column(), self.body.pointer(lse), lse.start(s, b, h, q0), rows, s.at(self.at["base"], place),
                s.at(self.at["lift"], place) if op.has_floor else None,
            )  # fmt: skip

    def write_queries(self, b: Index, h: Index, q_first: Index, panels: Index) -> None:
        s, g, op = self.s, self.g, self.op
        access = op["dq"]
        self.kit.call("unit", [self.at["unit"], s.s(op.scale)], _fill_panel)
        with s.loop(0, panels) as p:
            q0 = s.add(q_first, s.mul(p, g.queries))
            rows = s.i64(s.min(s.sub(op.queries, q0), g.queries))
            tile = s.at(self.at["dq"], s.mul(p, self.query_rows * g.queries))
            pack.write_lanes(
                self.kit, access.matrix(op.dim), tile, self.at["unit"], self.body.pointer(access),
                access.start(s, b, h, q0), rows,
            )  # fmt: skip

    def write_keys(self, b: Index, kv_head: Index, k0: Index, count: Index) -> None:
        s, op = self.s, self.op
        for name, dim, pitch, factor in (
            ("dk", op.dim, self.key_pitch, op.scale),
            ("dv", op.value_dim, self.value_pitch, 1.0),
        ):
            if op.has(name):
                access = op[name]
                pack.write_rows(
                    self.kit, access.matrix(dim), self.at[name], s.s(factor), self.body.pointer(access),
                    access.start(s, b, kv_head, k0), s.i64(count), pitch,
                )  # fmt: skip

    # --- the gradient of the mask ------------------------------------------------------------------------------------

    def _mask_panels(self) -> int:
        return self.size if self.op["dmask"].strides[2] else 1

    def _mask_rows(self) -> int:
        return self.block if self.op["dmask"].strides[3] else 1

    def _mask_phase(self) -> Phase:
        """A task owns a part of dmask: one broadcast cell of (batch, head), and one query group unless queries are
        summed; it goes through all that was broadcast, in order."""
        op, (over_b, over_h, over_q, over_k) = self.op, [stride == 0 for stride in self.op["dmask"].strides]
        sizes = (1 if over_b else op.batch, 1 if over_h else op.heads, 1 if over_q else self.groups)

        def emit(region: Region) -> None:
            self.start(region)
            s = self.s
            with region.tasks() as task:
                cell_b, cell_h, cell_group = self.body.unflatten(task, sizes)
                tile, size = self.at["dmask"], self._mask_panels() * self._mask_rows() * self.g.queries
                first, last = (0, self.groups) if over_q else (cell_group, s.add(cell_group, 1))

                def sum_block(k0: Index) -> None:
                    count = s.min(s.sub(op.keys, k0), self.block)
                    with s.loop(0, op.batch if over_b else 1) as i, s.loop(0, op.heads if over_h else 1) as j:
                        b, h = i if over_b else cell_b, j if over_h else cell_h
                        kv_head = h if op.group == 1 else ln.divui(s.i64(h), s.i(op.group))
                        self.pack_keys(b, kv_head, k0, count)
                        with s.loop(first, last) as group:
                            self._mask_group(b, h, s.mul(group, self.size), k0, count)

                if over_k:
                    self.clear(tile, size)
                with s.loop(0, op.keys, self.block) as k0:
                    if not over_k:
                        self.clear(tile, size)
                    sum_block(k0)
                    if not over_k:
                        self._write_mask(cell_b, cell_h, first, k0, s.min(s.sub(op.keys, k0), self.block), over_q)
                if over_k:
                    self._write_mask(cell_b, cell_h, first, 0, 1, over_q)

        return Phase(sizes[0] * sizes[1] * sizes[2], self.work.schedule.threads, emit)

    def _mask_group(self, b: Index, h: Index, first_panel: Index, k0: Index, count: Index) -> None:
        s, g, op = self.s, self.g, self.op
        panels = s.min(s.sub(self.work.panels(), first_panel), self.size)
        q_first = s.mul(first_panel, g.queries)
        self.pack_queries(b, h, q_first, panels)
        with s.loop(0, panels) as p:
            q0 = s.add(q_first, s.mul(p, g.queries))
            shift = s.sub(q0, k0) if op.causal else None
            rows = count if shift is None else s.min(count, s.add(shift, g.queries))
            with s.when("sgt", rows, 0):
                self.emit_scores(b, h, p, q0, k0, 0, s.i64(rows), shift)
                lanes = s.i64(s.min(s.sub(op.queries, q0), g.queries))
                target = s.at(
                    self.at["dmask"], s.mul(p, self._mask_rows() * g.queries if op["dmask"].strides[2] else 0)
                )
                step = g.queries if self._mask_rows() > 1 else 0
                self.kit.call(
                    "add_rows", [self.tile("products", p), target, s.i64(rows), lanes],
                    lambda s, *args: _add_rows(s, step, *args),
                )  # fmt: skip

    def _write_mask(self, b: Index, h: Index, first_group: Index, k0: Index, count: Index, over_q: bool) -> None:
        s, g, op = self.s, self.g, self.op
        access = op["dmask"]
        q_first = s.mul(first_group, self.size * g.queries)
        queries = 1 if over_q else s.min(s.sub(op.queries, q_first), self.size * g.queries)
        start = access.start(s, b, h, 0 if over_q else q_first, k0)
        self.kit.call(
            "write_mask",
            [self.at["dmask"], self.body.pointer(access), start, s.i64(queries), s.i64(count)],
            lambda s, *args: _write_mask(s, access, self._mask_rows(), over_q, *args),
        )


def _fill_panel(s: Scope, panel: Value, value: Value) -> None:
    for half in range(2):
        s.store(s.splat(value), panel, half * s.geometry.lanes)


def _add_rows(s: Scope, step: int, tile: Value, target: Value, rows: Value, lanes: Value) -> None:
    """target[k * step] += tile[k], for lanes that hold queries."""
    g = s.geometry
    integer = ln.int_type(32)
    for half in range(2):
        bound = ln.splat(ln.cast("trunci", s.add(lanes, -half * g.lanes), integer), g.lanes)
        valid = ln.cmpi("slt", ln.iota(integer, g.lanes), bound)
        with s.loop(0, rows) as k:
            value = s.load(tile, s.add(s.mul(k, g.queries), half * g.lanes))
            place = s.at(target, s.add(s.mul(k, step), half * g.lanes))
            s.store(ln.addf(s.load(place), ln.select(valid, value, s.v(0.0))), place)


def _write_mask(
    s: Scope, access, rows: int, over_q: bool, tile: Value, target: Value, start: Value, queries: Value, count: Value
) -> None:
    """The summed tile [panel][key][lane] to memory; lanes are added up where queries are broadcast."""
    g = s.geometry
    with s.loop(0, queries) as q, s.loop(0, count) as k:
        panel, lane = ln.divui(q, s.i(g.queries)), ln.remui(q, s.i(g.queries))
        place = s.add(s.mul(panel, rows * g.queries), s.mul(k, g.queries))
        if over_q:
            total = s.carrying(0, g.queries, 1, [s.s(0.0)],
                               lambda i, acc: [ln.addf(acc[0], s.load_scalar(tile, s.add(place, i)))])[0]  # fmt: skip
        else:
            total = s.load_scalar(tile, s.add(place, lane))
        where = s.add(s.add(start, s.mul(q, access.strides[2])), s.mul(k, access.strides[3]))
        ln.store(pack.narrow(s, total, access.element), s.at(target, where, access.element))


def phase(work: Work) -> Phase:
    """The phase of one backward op."""
    return Emitter(work).phase()
