"""Steps whose sizes depend on data, first run with sizes that look like others: one, none, a constant's, each other's.

What such a run cannot tell apart must not be replayed for other sizes: the step is recorded again. Runs whose sizes
are unlike any other are replayed, for every size that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as S

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nova
from tests.steps import leaves

ROWS, WIDTH = 8, 6
# how many rows the two masks keep: in the first call, then in the later ones
FIRST = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 8), (0, 0), (3, 4)]
LATER = [(3, 2), (4, 4), (1, 3), (5, 2), (2, 1), (6, 7), (8, 8), (7, 1), (0, 3), (3, 0)]


class Step:
    """Parameters, the rows of one of them that masks keep, and a loss made of those."""

    def __init__(self, loss: Callable[[S], Tensor]):
        generator = torch.Generator().manual_seed(3)
        shapes = {"x": (ROWS, WIDTH), "w": (5, WIDTH), "b": (1, WIDTH), "v": (WIDTH,), "u": (WIDTH, WIDTH), "p": (1, 1)}
        self.parameters = {name: nn.Parameter(torch.randn(s, generator=generator)) for name, s in shapes.items()}
        self.loss = loss

    def __call__(self, mask: Tensor, other: Tensor) -> list[Tensor]:
        for p in self.parameters.values():
            p.grad = None
        x = self.parameters["x"]
        loss = self.loss(S(**self.parameters, mask=mask, r=x[mask], q=x[other]))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in self.parameters.values() if p.grad is not None)]


def masks(kept: tuple[int, int]) -> tuple[Tensor, Tensor]:
    orders = ([0, 3, 7, 2, 5, 1, 6, 4], [7, 1, 4, 0, 2, 6, 3, 5])
    return tuple(torch.zeros(ROWS, dtype=torch.bool).index_fill(0, torch.tensor(o[:n]).long(), True)
                 for o, n in zip(orders, kept, strict=True))  # fmt: skip


def outcomes(step: Callable, sizes: list[tuple[int, int]]) -> list:
    found = []
    for kept in sizes:
        try:
            found.append([t.clone() for t in leaves(step(*masks(kept)))])
        except (RuntimeError, ValueError, IndexError) as error:
            found.append(error)
    return found


def compare(loss: Callable[[S], Tensor], first: tuple[int, int], **options: str) -> int:
    """Asserts that compiled is eager in every call; returns how often the step was recorded."""
    sizes = [first, *LATER]
    compiled = nova.jit(Step(loss), **options)
    for kept, a, b in zip(sizes, outcomes(Step(loss), sizes), outcomes(compiled, sizes), strict=True):
        where = f"first {first}, then {kept}"
        if isinstance(a, Exception):
            assert isinstance(b, Exception), f"{where}: eager raised {a!r}"
            continue
        assert not isinstance(b, Exception), f"{where}: {b!r}"
        assert [t.shape for t in a] == [t.shape for t in b], where
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m: f"{where}: {m}")
    return compiled.captures


def _in_place(s: S, write: Callable[[Tensor], None]) -> Tensor:
    y = s.r * 1
    write(y)
    return (y * s.r).sum()


def _experts(s: S) -> Tensor:
    out = torch.zeros_like(s.x)
    for scale, mask in enumerate((s.mask, ~s.mask), 1):
        (tokens,) = mask.nonzero(as_tuple=True)
        out = out.index_add(0, tokens, F.linear(s.x[tokens], s.u).relu() * scale)
    return (out - s.x).square().mean()


def _set(s: S, value: Callable[[Tensor], Tensor]) -> Tensor:
    y = s.x * 1
    y[s.mask] = value(y[s.mask])
    return (y * s.x).sum()


def _copied(s: S) -> Tensor:
    y, z = torch.empty(4, WIDTH), torch.zeros(3, WIDTH)
    y.copy_(s.v)
    z[:] = s.v * 2
    return y.sum() + z.square().sum() + s.r.mean()


# recorded once where sizes are unlike any other
REPLAYED = {
    "times a row": lambda s: (s.r * s.b).sum() + s.b.sum(),
    "times one": lambda s: (s.r * s.p).sum() + (s.r.sum(1, keepdim=True) * s.p).sum(),
    "where": lambda s: torch.where(s.r > 0, s.r, s.b).sum(),
    "plus a vector": lambda s: (s.r + s.v).square().sum(),
    "transposed": lambda s: (s.r.t() * s.v[:, None]).square().sum(),
    "products": lambda s: (s.r.t() @ s.r).square().sum() + (s.r @ s.r.t()).sum() + (s.r @ s.v).sum(),
    "means": lambda s: s.r.mean() + s.r.mean(0).sum() + s.r.mean(1).square().sum() + (s.r - s.r.mean(0)).abs().sum(),
    "softmax": lambda s: (s.r.softmax(0) * s.r).sum() + ((s.r @ s.r.t()).softmax(-1) @ s.r).square().sum(),
    "layer norm": lambda s: F.layer_norm(s.r, (WIDTH,), s.v).square().mean(),
    "linear": lambda s: F.linear(s.r, s.u).relu().square().mean(),
    "cross entropy": lambda s: F.cross_entropy((s.r @ s.u).view(-1, WIDTH), torch.arange(ROWS)[s.mask].remainder(6)),
    "squared error": lambda s: F.mse_loss(s.r, s.v.expand_as(s.r)),
    "flattened": lambda s: (s.r.view(-1) * s.r.reshape(-1)).sum(),
    "split features": lambda s: s.r.view(-1, 2, 3).sum(1).square().sum(),
    "two rows of a reshape": lambda s: s.r.reshape(2, -1).sum(1).square().sum(),
    "squeezed": lambda s: (s.r.squeeze() * s.v).sum(),
    "unbound features": lambda s: sum(c.sum() * i for i, c in enumerate(s.r.unbind(1))),
    "stacked": lambda s: torch.stack([s.r, s.r * 2]).square().sum(),
    "einsum": lambda s: torch.einsum("dw,nw->dn", s.r, s.x).square().sum(),
    "constant expansion": lambda s: (s.v.expand(5, WIDTH) * 2).square().sum() + s.r.sum(),
    "expansion of one": lambda s: (s.v.expand(1, WIDTH) * 2).square().sum() + s.r.sum(),
    "constant zeros": lambda s: (s.r.new_zeros(5, WIDTH) + 1).sum() * s.r.sum(),
    "another mask": lambda s: (s.v.expand_as(s.r) * s.r).sum() + (s.v.expand_as(s.q) * s.q).square().sum(),
    "means over two masks": lambda s: s.r.mean() + s.q.mean() * 2 + (s.r.sum(0) * s.q.sum(0)).sum(),
    "all pairs": lambda s: (s.r[:, None] - s.q[None]).square().sum() + (s.r @ s.q.t()).logsumexp(1).mean(),
    "one mask twice": lambda s: (s.r * s.x[s.mask.nonzero().squeeze(1)] * s.x[s.mask]).mean(),
    "experts": _experts,
    "rows set": lambda s: _set(s, lambda rows: rows * 2 + 1),
    "rows set to one": lambda s: _set(s, lambda rows: s.b),
    "rows filled": lambda s: _in_place(s, lambda y: y.detach().fill_(3)),
}
# also wrong before, or always recorded again: a derivative that holds sizes as numbers, say
OTHERS = {
    "first and last": lambda s: (s.r[:1] * 2).sum() + (s.r[-1:] * 3).sum(),
    "two first and two last": lambda s: (s.r[:2] * 2).sum() + (s.r[-2:] * 3).sum(),
    "the middle, counted from both ends": lambda s: (s.r[1:3] * 2).sum() + (s.r[-3:-1] * 3).sum(),
    "five first, or all": lambda s: (s.r[:5] * 2).sum() + s.r.sum() * 3,
    "every second, or the first": lambda s: (s.r[::2] * 2).sum() + (s.r[:1] * 3).sum(),
    "without an end": lambda s: (s.r[1:] * 2).sum() + (s.r[:-1] * 3).sum(),
    "detached windows": lambda s: (s.r.detach()[:1] * 2 + s.r.detach()[-1:] * 3).sum() + s.r.sum(),
    "written ends": lambda s: _in_place(s, lambda y: (y[:1].add_(1), y[-1:].mul_(2))),
    "written rest": lambda s: _in_place(s, lambda y: y.detach()[1:].fill_(3)),
    "met by a constant": lambda s: (s.r + s.w).sum(),
    "rows of a mask of rows": lambda s: (s.r[s.r[:, 0] > 0][:1] * 3).sum() + (s.r[:1] * 5).sum(),
    "halves": lambda s: sum((half * i).sum() for i, half in enumerate(s.r.chunk(2), 2)),
    "repeated": lambda s: s.r.repeat(2, 1).square().sum(),
    "running sums": lambda s: (s.r.cumsum(0) * s.r).sum(),
    "sorted": lambda s: s.r.sort(0)[0][:1].sum() + s.r.max(0)[0].sum(),
    "joined": lambda s: torch.cat([s.r, s.x]).square().sum() + torch.cat([s.r, s.r[:1]]).square().sum(),
    "variance": lambda s: s.r.var(0).sum(),
    "constant sums beside": lambda s: s.w[:3].sum() + s.w[:4].mean() + s.r.mean() + s.r.sum(),
    "constant copies": _copied,
    "constant pieces": lambda s: torch.cat([s.w[:2], s.w[:2]]).square().sum() + s.r.square().sum(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*REPLAYED, *OTHERS])
def test_no_size_is_taken_for_another(name: str) -> None:
    loss = (REPLAYED | OTHERS)[name]
    for first in FIRST:
        compare(loss, first, backend="interpret")


@pytest.mark.parametrize("name", REPLAYED)
def test_sizes_unlike_any_other_are_recorded_once(name: str) -> None:
    first = (5, 4) if name == "split features" else (3, 4)
    assert compare(REPLAYED[name], first, backend="interpret") == 1


@pytest.mark.parametrize("name", ["times a row", "another mask", "experts", "constant expansion"])
def test_compiled(name: str) -> None:
    for first in ((1, 1), (5, 5), (8, 8)):
        assert compare(REPLAYED[name], first) <= 3


def test_a_mask_that_keeps_all_is_replayed() -> None:
    """Packed batches have no padding, call after call."""

    def loss(s: S) -> Tensor:
        return (
            F.cross_entropy(F.linear(s.r, s.u), torch.arange(ROWS)[s.mask].remainder(6))
            + F.layer_norm(s.r, (WIDTH,)).mean()
        )

    step = nova.jit(Step(loss), backend="interpret")
    for _ in range(3):
        step(*masks((8, 8)))
    assert step.captures == 1


@pytest.mark.parametrize("backend", ["interpret", "compile"])
@pytest.mark.parametrize("statistics", [True, False])
def test_batch_norm_of_a_single_row_is_eagers_error(backend: str, statistics: bool) -> None:
    """Also where other rows were kept when the step was captured; the statistics stay as they were."""
    results = []
    for transform in (lambda f: f, lambda f: nova.jit(f, backend=backend)):
        torch.manual_seed(0)
        x, model = torch.randn(ROWS, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=statistics)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(mask: Tensor, x: Tensor = x, model: nn.Module = model, optimizer: object = optimizer) -> Tensor:
            loss = (model(x[mask]) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run, found = transform(step), []
        for kept in (3, 4, 1, 5, 1, 2):
            mask = torch.arange(ROWS) < kept
            if kept > 1:
                found.append(run(mask))
            else:
                with pytest.raises(ValueError, match="more than 1 value per channel"):
                    run(mask)
        counted = [t for name, t in model.state_dict().items() if name != "num_batches_tracked"]
        results.append([*found, *counted])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)
