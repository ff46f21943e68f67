"""Which loops of a group are its rows, and whether its reductions can share one kernel.

A `loops` kernel walks its rows in parallel. A row reduction (softmax's sum, layer norm's mean) happens inside a row; a
cross-row reduction (a column sum, a mean over everything) collects over all rows, and is known only after the last.

    layer norm backward, x [8192, 768]:  rows {8192};  sums over 768 are row reductions, dweight and dbias cross-row
    batch norm, x [N, C, H*W]:           rows {C};     sums over N and H*W stay inside the row
    bias gradient, dy [8192, 768]:       rows {8192};  one cross-row reduction
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nova.fusion.records import Op, Value
from nova.fusion.rules import CONTRACTIONS, PIECEWISE, REDUCTIONS, equal_pieces
from nova.fusion.space import Atom, Reduction, Space

# With fewer rows than this in front of a reduced dimension there is too little to run in parallel, and the dimension
# itself is cut into rows instead.
MIN_ROWS = 8


@dataclass
class Roles:
    """The rows of a group and the kind of each reduction ("row", "cross" or "total": inside rows, then across)."""

    rows: list[Atom] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)  # position in space.reductions -> kind
    after: set[Value] = field(default_factory=set)  # values known only after all rows
    reason: str | None = None  # why there are no such rows


def product(atoms: list[Atom]) -> int:
    count = 1
    for atom in atoms:
        count *= atom.size
    return count


def _parts(space: Space, reduction: Reduction) -> tuple[list[Atom], list[Atom], list[Atom]]:
    order = [leaf for atoms in reduction.over for leaf in space.leaves(atoms)]
    reduced = [leaf for atoms in reduction.reduced for leaf in space.leaves(atoms)]
    kept = [leaf for leaf in order if leaf not in reduced]
    return order, reduced, kept


def _row_candidates(order: list[Atom], reduced: list[Atom], kept: list[Atom]) -> list[Atom] | None:
    """The loops in front of which a row reduction can sit; None if it should go across rows."""
    if order[-1] in reduced:
        return kept
    first = min(order.index(atom) for atom in reduced)
    prefix = order[:first]
    return prefix if product(prefix) >= MIN_ROWS else None


def find(space: Space, clones: set[Op] | frozenset[Op] = frozenset()) -> Roles:
    """The roles of the loops of `space`; `reason` is set where its ops cannot be one kernel."""
    roles = Roles()
    rows: list[Atom] | None = None
    cross: list[tuple[int, list[Atom]]] = []
    totals: list[int] = []
    broadcasts = _broadcast_reductions(space)
    for position, reduction in enumerate(space.reductions):
        if reduction.op.name in CONTRACTIONS:
            continue
        order, reduced, kept = _parts(space, reduction)
        if not reduced:
            roles.kinds[position] = "row"
            continue
        if not kept:
            roles.kinds[position] = "total"
            totals.append(position)
            continue
        candidates = _row_candidates(order, reduced, kept)
        if candidates is None and position in broadcasts:
            candidates = [atom for atom in kept if order.index(atom) < order.index(reduced[0])] or kept
        if candidates is None:
            roles.kinds[position] = "cross"
            cross.append((position, reduced))
        else:
            roles.kinds[position] = "row"
            rows = candidates if rows is None else [atom for atom in rows if atom in candidates]
    for _, reduced in cross:
        if rows is None:
            rows = reduced
        elif set(rows) != set(reduced):
            roles.reason = "reduces over loops that are not the rows of the kernel"
    for position, reduction in enumerate(space.reductions):
        if roles.kinds.get(position) == "row" and rows:
            _, reduced, kept = _parts(space, reduction)
            if any(atom in rows for atom in reduced) or not set(rows) <= set(kept):
                roles.reason = "reduces over loops that are rows of the kernel"
    if rows is None and totals:
        order = _parts(space, space.reductions[totals[0]])[0]
        rows = order[:-1] if len(order) > 1 else order
    roles.rows = rows or []
    if rows is not None and not rows and any(kind == "row" for kind in roles.kinds.values()) and cross:
        roles.reason = "has no rows in common"
    _find_after(space, roles, clones)
    return roles


def _broadcast_reductions(space: Space) -> set[int]:
    """Reductions whose op needs the result again for every element (normalisations)."""
    found: set[int] = set()
    seen: set[Op] = set()
    for position, reduction in enumerate(space.reductions):
        keeps = reduction.op.name in REDUCTIONS and not reduction.op.name.startswith("arg")
        if not keeps and reduction.op not in seen:
            found.add(position)
        seen.add(reduction.op)
    return found


def _cross_results(space: Space, roles: Roles) -> set[Value]:
    """Results of ops inside that are complete only after all rows."""
    found: set[Value] = set()
    for position, reduction in enumerate(space.reductions):
        if roles.kinds.get(position) not in ("cross", "total"):
            continue
        op = reduction.op
        if op.name == "layer_norm_backward":
            found.update(op.results[1:])
        elif op.name in ("sce", "sce_merge"):
            found.add(op.results[0])
        else:
            found.update(op.results)
    return found


def _find_after(space: Space, roles: Roles, clones: set[Op] | frozenset[Op]) -> None:
    roles.after = _cross_results(space, roles)
    rows = set(roles.rows)
    reducing = {reduction.op for reduction in space.reductions}
    plain: set[frozenset[Atom]] = set()
    piecewise = any(op.name in PIECEWISE and not (op.name == "concat" and equal_pieces(op)) for op in space.inside)
    for op in space.inside:
        after = any(value in roles.after for value in _sources(space, op))
        loops = {leaf for result in op.results for leaf in space.loops(space.outputs[result].dims)}
        if after:
            if op in reducing or loops & rows:
                roles.reason = "needs a sum over all rows for every row"
            roles.after.update(op.results)
        elif op in reducing or op in clones:
            continue
        elif reducing:
            if not rows <= loops and not piecewise:
                roles.reason = "would be computed again for each row"
        else:
            plain.add(frozenset(loops))
        if any(_is_piecewise(value) and value in space.outputs for value in _sources(space, op)):
            roles.reason = "reads a value that is assembled from pieces"
    if len(plain) > 1 and not piecewise:
        roles.reason = "has other loops"
    if piecewise and reducing:
        roles.reason = "assembles a value from pieces beside a reduction"


def _is_piecewise(value: Value) -> bool:
    op = value.op
    return op is not None and op.name in PIECEWISE and not (op.name == "concat" and equal_pieces(op))


def _sources(space: Space, op: Op) -> list[Value]:
    """The values behind the op's operands, through views."""
    result = []
    for value in op.operands:
        while (
            value.op is not None
            and value not in space.outputs
            and value.op.name in ("reshape", "transpose", "broadcast")
        ):
            value = value.op.operands[0]
        result.append(value)
    return result
