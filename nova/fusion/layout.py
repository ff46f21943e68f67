"""Gives memory tensors shapes, so that every access is a simple indexing map; merges loops that stay together.

    x at 98304*b + 768*t + 64*h + d                      loops b, t merged (8192), x : tensor<8192x12x64>, x[bt, h, d]
    q at 768*3*t + 64*h + d, k at 768*3*t + 768 + 64*h + d   qkv : tensor<8192x36x64>, q = [t, h, d], k = [t, 12 + h, d]
    every second column at 100*i + 2*j + 1                       : tensor<..x50x2>, [i, j, 1]

A buffer's shape is the chain of strides with which its accesses walk it, where these divide one another. Otherwise the
original shape serves, with linear maps, or in the last resort one dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nova.fusion.kernel import Expr, Index, Kernel, Linear, Tensor, binary, const, expr, load

# --- merging loops ---------------------------------------------------------------------------------------------------


def coalesce(kernel: Kernel) -> None:
    """Merges pairs of loops that every access walks as one."""
    merged = True
    while merged:
        merged = False
        for outer in range(len(kernel.loops)):
            for inner in range(len(kernel.loops)):
                if outer != inner and _together(kernel, outer, inner):
                    _merge(kernel, outer, inner)
                    merged = True
                    break
            if merged:
                break


def _linears(kernel: Kernel) -> Iterable[Linear]:
    for op in kernel.ops:
        for out in op.outs:
            if out.tensor.kind != "local":
                yield from out.index
        for node in op.nodes():
            if node.op == "linear":
                yield node.attr
            elif node.op == "load" and node.attr[0].kind != "local":
                yield from node.attr[1]


def _local_indices(kernel: Kernel) -> Iterable[Index]:
    for op in kernel.ops:
        for out in op.outs:
            if out.tensor.kind == "local":
                yield out.index
        for tensor, index in op.loads():
            if tensor.kind == "local":
                yield index


def _together(kernel: Kernel, outer: int, inner: int) -> bool:
    used = False
    for op in kernel.ops:
        if (outer in op.loops) != (inner in op.loops) or (outer in op.reduced) != (inner in op.reduced):
            return False
        used = used or outer in op.loops
    tiled = {loop for pair in kernel.tiles.items() for loop in (pair[0], pair[1][0])}
    if not used or outer in tiled or inner in tiled or (outer in kernel.rows) != (inner in kernel.rows):
        return False
    size = kernel.loops[inner]
    for item in _linears(kernel):
        terms = dict(item.terms)
        if terms.get(outer, 0) != terms.get(inner, 0) * size:
            return False
    for index in _local_indices(kernel):
        loops = {loop for item in index for loop, _ in item.terms}
        if (outer in loops) != (inner in loops):
            return False
    return True


def _merge(kernel: Kernel, outer: int, inner: int) -> None:
    """Loop `inner` becomes both; `outer` disappears, its place in loop orders goes to `inner`."""
    size = kernel.loops[outer] * kernel.loops[inner]

    def shrink(item: Linear) -> Linear:
        return Linear(item.const, tuple(term for term in item.terms if term[0] != outer))

    def order(loops: tuple[int, ...]) -> tuple[int, ...]:
        if outer not in loops:
            return loops
        return tuple(inner if loop == outer else loop for loop in loops if loop != inner)

    tensors: dict[Tensor, Tensor] = {}

    def local(tensor: Tensor, index: Index) -> tuple[Tensor, Index]:
        loops = [item.single() for item in index]
        if outer not in loops:
            return tensor, index
        kept = [(item, n) for item, n, loop in zip(index, tensor.shape, loops, strict=True) if loop != outer]
        if tensor not in tensors:
            shape = tuple(size if item.single() == inner else n for item, n in kept)
            tensors[tensor] = Tensor("local", shape, tensor.dtype, tensor.name)
        return tensors[tensor], tuple(item for item, _ in kept)

    def change(node: Expr) -> Expr | None:
        if node.op == "linear":
            return expr("linear", (), "index", shrink(node.attr))
        if node.op == "load":
            tensor, index = node.attr
            if tensor.kind == "local":
                return load(*local(tensor, index))
            return load(tensor, tuple(shrink(item) for item in index))
        return None

    for op in kernel.ops:
        op.map(change)
        for out in op.outs:
            if out.tensor.kind == "local":
                out.tensor, out.index = local(out.tensor, out.index)
            else:
                out.index = tuple(shrink(item) for item in out.index)
        op.loops = order(op.loops)
        op.reduced = op.reduced - {outer}
    kernel.rows = list(order(tuple(kernel.rows)))
    kernel.loops[inner] = size
    kernel.loops[outer] = 1


def renumber(kernel: Kernel) -> None:
    """Numbers the loops that are left 0, 1, .. in the order in which they nest."""
    order = list(dict.fromkeys(kernel.rows))
    for op in sorted(kernel.ops, key=lambda o: -len(o.loops)):
        order += [loop for loop in op.loops if loop not in order]
    order += [loop for loop in kernel.tiles if loop not in order]
    numbers = {loop: number for number, loop in enumerate(order)}

    def item(old: Linear) -> Linear:
        return Linear.of({numbers[loop]: c for loop, c in old.terms}, old.const)

    def change(node: Expr) -> Expr | None:
        if node.op == "linear":
            return expr("linear", (), "index", item(node.attr))
        if node.op == "load":
            return load(node.attr[0], tuple(map(item, node.attr[1])))
        return None

    for op in kernel.ops:
        op.map(change)
        for out in op.outs:
            out.index = tuple(map(item, out.index))
        op.loops = tuple(sorted(numbers[loop] for loop in op.loops))
        op.reduced = frozenset(numbers[loop] for loop in op.reduced)
    kernel.rows = sorted(numbers[loop] for loop in kernel.rows)
    kernel.loops = [kernel.loops[loop] for loop in order]
    kernel.tiles = {numbers[loop]: (numbers[n], size) for loop, (n, size) in kernel.tiles.items()}


# --- shapes of buffers -----------------------------------------------------------------------------------------------


def assign_shapes(kernel: Kernel) -> None:
    """Replaces flat indices by indices into shaped buffers."""
    accesses: dict[Tensor, list[Linear]] = {}
    captured: set[Tensor] = set()
    for op in kernel.ops:
        for out in op.outs:
            if out.tensor.kind != "local":
                accesses.setdefault(out.tensor, []).append(out.index[0])
        for node in op.nodes():
            if node.op == "load" and node.attr[0].kind != "local":
                accesses.setdefault(node.attr[0], []).append(node.attr[1][0])
            elif node.op == "tensor.extract":
                captured.add(node.attr)
    table: dict[tuple[Tensor, Linear], Index] = {}
    reshaped: dict[Tensor, tuple[int, ...]] = {}
    for tensor, items in accesses.items():
        if -1 in tensor.shape:  # one tensor of a multi-tensor kernel: any size
            for item in items:
                table[tensor, item] = (item,) if item.terms else ()
            continue
        shape, indices = choose_shape(tensor, list(dict.fromkeys(items)), kernel.loops, tensor in captured)
        if tensor in captured and shape != tensor.shape:
            reshaped[tensor] = tensor.shape
        tensor.shape = shape
        for item, index in indices.items():
            table[tensor, item] = index

    def change(node: Expr) -> Expr | None:
        if node.op == "load" and node.attr[0].kind != "local":
            tensor, (item,) = node.attr
            return load(tensor, table[tensor, item])
        if node.op == "tensor.extract" and node.attr in reshaped:
            tensor = node.attr
            return expr(node.op, reshaped_indices(node.args, reshaped[tensor], tensor.shape), node.type, tensor)
        return None

    for op in kernel.ops:
        op.map(change)
        for out in op.outs:
            if out.tensor.kind != "local":
                out.index = table[out.tensor, out.index[0]]


def choose_shape(
    tensor: Tensor, items: list[Linear], sizes: list[int], captured: bool = False
) -> tuple[tuple[int, ...], dict[Linear, Index]]:
    """A shape for the buffer, and the index of each access in it.

    A captured tensor is also indexed by computed positions, so it keeps its shape if it can.
    """
    numel = tensor.numel
    original = row_major(tensor.shape)
    candidates: list[list[int]] = []
    if numel:
        strides = {abs(c) for item in items for loop, c in item.terms if sizes[loop] > 1} | {1}
        chain = sorted((s for s in strides if s < numel or numel == 1), reverse=True)
        if numel == 1 and not captured and not any(item.terms for item in items):
            return (), dict.fromkeys(items, ())
        if all(a % b == 0 for a, b in zip([numel, *chain], chain, strict=False)):
            candidates.append(chain)
    candidates.insert(0 if captured else len(candidates), original)
    candidates.append([1])
    for chain in candidates:
        shape = tensor.shape if chain is original else _extents(numel, chain)
        indices = {item: _in_shape(item, chain, shape, sizes) for item in items}
        if all(index is not None for index in indices.values()):
            return shape, indices  # type: ignore[return-value]
    raise AssertionError(f"no shape for {tensor} with accesses {items}")


def reshaped_indices(indices: Sequence[Expr], shape: Sequence[int], target: Sequence[int]) -> list[Expr]:
    """Indices into a buffer of shape `target` for indices of its reshape to `shape`."""
    flat = const(0, "index")
    for index, size in zip(indices, shape, strict=True):
        flat = binary("arith.addi", binary("arith.muli", flat, const(size, "index")), index)
    if len(target) == 1:
        return [flat]
    result: list[Expr] = []
    for size in reversed(target):
        result.append(binary("arith.remui", flat, const(max(1, size), "index")))
        flat = binary("arith.divui", flat, const(max(1, size), "index"))
    return result[::-1]


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a dense buffer of `shape`."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The shape that tensors of `shapes` have together."""
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(s)) + list(s) for s in shapes]
    return [next((n for n in axis if n != 1), 1) for axis in zip(*padded, strict=True)]


def broadcast_strides(shape: Sequence[int], full: Sequence[int]) -> list[int]:
    """Strides of a dense buffer of `shape` seen in the broadcast shape `full`."""
    own = [0 if n == 1 else s for n, s in zip(shape, row_major(shape), strict=True)]
    return [0] * (len(full) - len(shape)) + own


def _extents(numel: int, chain: list[int]) -> tuple[int, ...]:
    return tuple(a // b for a, b in zip([numel, *chain], chain, strict=False))


def _in_shape(item: Linear, chain: list[int], shape: tuple[int, ...], sizes: list[int]) -> Index | None:
    """The access as one linear expression per dimension; None if a dimension would overflow into the next."""
    consts, rest = [], item.const
    for stride in chain:
        consts.append(rest // stride if stride else 0)
        rest -= consts[-1] * stride
    if rest:
        return None
    terms: list[dict[int, int]] = [{} for _ in chain]
    reach = list(consts)
    for loop, coefficient in item.terms:
        place = next((i for i, s in enumerate(chain) if s and coefficient % s == 0 and shape[i] != 1), None)
        if place is None:
            if sizes[loop] <= 1:
                continue
            return None
        factor = coefficient // chain[place]
        terms[place][loop] = factor
        reach[place] += abs(factor) * max(0, sizes[loop] - 1)
    for size, most in zip(shape, reach, strict=True):
        if most >= size and size:
            return None
    return tuple(Linear.of(t, c) for t, c in zip(terms, consts, strict=True))
