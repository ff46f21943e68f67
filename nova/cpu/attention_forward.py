"""Attention forward: one task owns a group of query panels of one head and walks the key blocks once.

Scratch of a thread, by size: packed K and V blocks, transposed queries and outputs of the group's panels, one score
tile. A key block stays in the caches while all panels of the group use it; the score tile never leaves the first level.
"""

from __future__ import annotations

from nova.cpu import attention_mask as masks
from nova.cpu import attention_pack as pack
from nova.cpu import attention_softmax as softmax
from nova.cpu.attention import Body, Work
from nova.cpu.attention_tiles import emit_scores, emit_weighted, padded_rows
from nova.cpu.parallel import Phase, Region
from nova.lowering import lanes as ln


def phase(work: Work) -> Phase:
    """The phase that computes out and lse."""
    op, g, schedule = work.op, work.geometry, work.schedule
    groups = -(-work.panels() // schedule.panels)
    size, value_rows = schedule.panels, padded_rows(op.value_dim, g.rows)
    key_pitch, value_pitch = g.row_pitch(op.dim), g.row_pitch(op.value_dim)
    slots = {
        "keys": work.scratch(schedule.block_keys * key_pitch),
        "values": work.scratch(schedule.block_keys * value_pitch + g.rows),
        "queries": work.scratch(size * op.dim * g.queries),
        "outputs": work.scratch(size * value_rows * g.queries),
        "scores": work.scratch(schedule.block_keys * g.queries),
        "maxima": work.scratch(size * g.queries),
        "sums": work.scratch(size * g.queries),
        "alpha": work.scratch(g.queries),
        "statistic": work.scratch(g.queries),
    }
    if op.dropout:
        slots["keep"] = work.scratch(schedule.block_keys * g.queries)

    def emit(region: Region) -> None:
        body = Body(work, region)
        s, kit = body.scope, work.kit
        at = {name: body.scratch(slot) for name, slot in slots.items()}
        factor = s.s(op.factor)
        with region.tasks() as task:
            b, h, group = body.unflatten(task, (op.batch, op.heads, groups))
            kv_head = h if op.group == 1 else ln.divui(s.i64(h), s.i(op.group))
            first_panel = s.mul(group, size)
            panels = s.min(s.add(work.panels(), s.mul(first_panel, -1)), size)

            with s.loop(0, panels) as p:
                q0 = s.mul(s.add(first_panel, p), g.queries)
                rows = s.min(s.sub(op.queries, q0), g.queries)
                queries = op["q"]
                pack.pack_lanes(
                    kit, queries.matrix(op.dim), body.pointer(queries), queries.start(s, b, h, q0), s.i64(rows),
                    s.at(at["queries"], s.mul(p, op.dim * g.queries)),
                )  # fmt: skip
                outputs = s.at(at["outputs"], s.mul(p, value_rows * g.queries))
                with s.loop(0, value_rows * g.queries, g.lanes) as i:
                    s.store(s.v(0.0), outputs, i)
                for half in range(2):
                    place = s.add(s.mul(p, g.queries), half * g.lanes)
                    s.store(s.v(softmax.START), at["maxima"], place)
                    s.store(s.v(0.0), at["sums"], place)

            end: object = op.keys
            if op.causal:  # keys after the group's last query are never visited
                end = s.min(s.mul(s.add(first_panel, panels), g.queries), op.keys)
            with s.loop(0, end, schedule.block_keys) as k0:
                count = s.min(s.sub(end, k0), schedule.block_keys)
                padded = s.i64(s.round_up(count, g.row_unit))
                for name, pitch, columns in (("k", key_pitch, op.dim), ("v", value_pitch, op.value_dim)):
                    access = op[name]
                    start = access.start(s, b, kv_head, k0)
                    pack.pack_rows(
                        kit, access.matrix(columns), body.pointer(access), start, s.i64(count), padded,
                        at["keys" if name == "k" else "values"], pitch,
                    )  # fmt: skip
                with s.loop(0, panels) as p:
                    q0 = s.mul(s.add(first_panel, p), g.queries)
                    shift = s.sub(q0, k0) if op.causal else None
                    rows = s.min(count, s.add(shift, g.queries)) if op.causal else count
                    with s.when("sgt", rows, 0):
                        _panel(body, at, b, h, q0, k0, p, s.i64(rows), shift, factor)

            with s.loop(0, panels) as p:
                q0 = s.mul(s.add(first_panel, p), g.queries)
                rows = s.i64(s.min(s.sub(op.queries, q0), g.queries))
                place = s.mul(p, g.queries)
                softmax.finish_rows(
                    kit, s.at(at["maxima"], place), s.at(at["sums"], place), at["alpha"], at["statistic"], op.has_floor
                )
                if op.has("out"):
                    out = op["out"]
                    pack.write_lanes(
                        kit, out.matrix(op.value_dim), s.at(at["outputs"], s.mul(p, value_rows * g.queries)),
                        at["alpha"], body.pointer(out), out.start(s, b, h, q0), rows,
                    )  # fmt: skip
                if op.has("lse"):
                    lse = op["lse"]
                    pack.write_rows(
                        kit, lse.column(), at["statistic"], s.s(1.0), body.pointer(lse), lse.start(s, b, h, q0), rows, 1
                    )

    def _panel(body: Body, at, b, h, q0, k0, p, rows, shift, factor) -> None:
        s, kit = body.scope, work.kit
        queries = s.at(at["queries"], s.mul(p, op.dim * g.queries))
        kit.call(
            "scores", [at["keys"], queries, at["scores"], rows, factor],
            lambda s, *args: emit_scores(s, *args, dim=op.dim, pitch=key_pitch),
        )  # fmt: skip
        if op.mask:
            access = op["mask"]
            lanes = s.i64(s.min(s.sub(op.queries, q0), g.queries))
            masks.apply_mask(
                kit, op.mask, body.pointer(access), access.start(s, b, h, q0, k0), lanes, at["scores"], rows
            )
        place = s.mul(p, g.queries)
        softmax.softmax_step(
            kit, at["scores"], s.at(at["maxima"], place), s.at(at["sums"], place), at["alpha"], rows, shift
        )
        if op.dropout:
            element = element_index(s, op, b, h, q0, k0)
            masks.keep_tile(kit, op.dropout, body.pointer(op["seed"]), element, at["keep"], rows)
            kit.call("apply_keep", [at["scores"], at["keep"], rows], _multiply_rows)
        outputs = s.at(at["outputs"], s.mul(p, value_rows * g.queries))
        kit.call(
            "weighted", [at["values"], at["scores"], outputs, s.i64(s.round_up(rows, 4)), at["alpha"]],
            lambda s, *args: emit_weighted(s, *args, dim=op.value_dim, pitch=value_pitch),
        )  # fmt: skip

    return Phase(work.op.batch * op.heads * groups, schedule.threads, emit, cyclic=op.causal and groups > 1)


def element_index(s, op, b, h, q0, k0):
    """The number of element (b, h, q0, k0) of the [B, H, T, S] tensor that is never made."""
    row = s.add(s.mul(s.add(s.mul(b, op.heads), h), op.queries), q0)
    return s.i64(s.add(s.mul(row, op.keys), k0))


def _multiply_rows(s, tile, keep, rows) -> None:
    g = s.geometry
    with s.loop(0, rows) as k:
        place = s.mul(k, g.queries)
        for half in range(2):
            value = ln.mulf(s.load(s.at(tile, place), half * g.lanes), s.load(s.at(keep, place), half * g.lanes))
            s.store(value, s.at(tile, place), half * g.lanes)
