"""How a contraction is cut into matrix tiles: which dimensions a block walks flat, and which are coordinates of it.

    y[b, h, m, n] += x[b, m, k] * w[h, n, k]       m: x walks (b, m) as one dimension     -> tiles of b * m rows
                                                   n: w walks (h, n) as one dimension     -> tiles of h * n columns
                                                   the store splits both again: digits of the flat row and column

Tiles are matrices of the operands, so what counts is how the operands walk; everything else that is read or written for
a place of the result is addressed from its flat row and column. What an operand does not walk as one dimension (the
rows of a convolution's window) is an outer coordinate, the same for the whole block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nova.fusion.access import Access, contiguous_run
from nova.fusion.contraction_form import Contraction, bytes_of, problem_of
from nova.schedule.contraction import ContractionProblem
from nova.schedule.model import OPERATION_COST

SHORT = 16  # a shorter innermost dimension is no good tile if a longer one is there


@dataclass(frozen=True)
class Role:
    """m, n or k: `tile` dimensions, outermost first, which operands walk as one; `outer` ones, one place at a time."""

    tile: tuple[int, ...]
    outer: tuple[int, ...]
    extent: int  # of the tile dimensions together
    outer_extent: int


@dataclass(frozen=True)
class Tiling:
    """All roles, and the strides of the operands along them (of a role's flat index; 0 if it has no dimensions)."""

    m: Role
    n: Role
    k: Role
    batch: tuple[int, ...]
    sizes: tuple[int, ...]
    lhs_strides: tuple[int, int]  # along m, k
    rhs_strides: tuple[int, int]  # along k, n

    @property
    def outer(self) -> tuple[int, ...]:
        """Dimensions of which a block has one coordinate, outermost first."""
        return (*self.batch, *self.m.outer, *self.n.outer)

    @property
    def outer_extent(self) -> int:
        return math.prod(self.sizes[d] for d in self.outer)


def tiling_of(c: Contraction) -> Tiling:
    sizes = tuple(c.dims.sizes)
    m = _role(c.dims.m, sizes, (c.lhs,))
    n = _role(c.dims.n, sizes, (c.rhs,))
    k = _role(c.dims.k, sizes, (c.lhs, c.rhs))

    def stride(access: Access, role: Role) -> int:
        return access.coefficients[role.tile[-1]] if role.tile else 0

    return Tiling(
        m, n, k, tuple(d for d in c.dims.batch if sizes[d] != 1), sizes,
        (stride(c.lhs, m), stride(c.lhs, k)), (stride(c.rhs, k), stride(c.rhs, n)),
    )  # fmt: skip


def _role(dims: Sequence[int], sizes: Sequence[int], accesses: Sequence[Access]) -> Role:
    dims = [d for d in dims if sizes[d] != 1]
    orders = [dims, sorted(dims, key=lambda d: -abs(accesses[-1].coefficients[d]))]
    tile = max((_run(order, sizes, accesses) for order in orders), key=lambda run: math.prod(sizes[d] for d in run))
    longest = max(dims, key=lambda d: sizes[d], default=-1)
    extent = math.prod(sizes[d] for d in tile)
    if dims and extent < SHORT and sizes[longest] > extent:
        tile, extent = (longest,), sizes[longest]
    outer = tuple(d for d in dims if d not in tile)
    return Role(tile, outer, extent, math.prod(sizes[d] for d in outer))


def _run(dims: Sequence[int], sizes: Sequence[int], accesses: Sequence[Access]) -> tuple[int, ...]:
    """The longest tail of `dims` that all accesses walk in equal steps."""
    for start in range(len(dims)):
        tail = dims[start:]
        length = math.prod(sizes[d] for d in tail)
        if all(contiguous_run(access, tail, sizes)[1] == length for access in accesses):
            return tuple(tail)
    return ()


def tiled_problem(c: Contraction) -> ContractionProblem:
    """The problem in terms of tiles: outer coordinates count as batches, and K comes in runs."""
    tiling = tiling_of(c)
    problem = problem_of(c)
    lhs = replace(problem.lhs, across_stride=tiling.lhs_strides[0], k_stride=tiling.lhs_strides[1])
    rhs = replace(problem.rhs, across_stride=tiling.rhs_strides[1], k_stride=tiling.rhs_strides[0])
    return replace(
        problem, m=tiling.m.extent, n=tiling.n.extent, batch=tiling.outer_extent, lhs=lhs, rhs=rhs,
        k_run=tiling.k.extent if tiling.k.outer else 0, epilogue_operations=round(_epilogue_cost(c)),
        output_bytes=sum(bytes_of(access.element) for _, access in c.outputs if not access.coefficients[c.tile_dim]),
    )  # fmt: skip


def _epilogue_cost(c: Contraction) -> float:
    """Weighted operations of all epilogue regions for one place of the result."""
    generics = {id(generic): generic for generic, _ in c.generics.values() if generic is not c.core}
    return sum(OPERATION_COST.get(view.operation.name, 1.0) for g in generics.values() for view in g.block.operations)
