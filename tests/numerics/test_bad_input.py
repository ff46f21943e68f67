"""Inputs that a step cannot be run on: an error that names the cause, and the model as it was."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from steps import check
from torch import nn

import nova
from nova.errors import CaptureError, UnsupportedError


@pytest.mark.parametrize("first", [False, True])
def test_a_meta_tensor_is_an_error_and_changes_nothing(first):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @nova.jit
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    if not first:
        step(x, y)
        step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((RuntimeError, ValueError), match="meta"):
        step(x.to("meta"), y)
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    assert torch.isfinite(step(x, y))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_added_or_removed_later_is_seen(kind):
    def build():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handles = []

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def triple(tensor):
            if kind == "register_hook":
                return tensor * 3
            tensor.grad = tensor.grad * 3
            return None

        def add():
            handles.append(getattr(model.weight, kind)(triple))

        def remove():
            handles.pop().remove()

        batch = lambda: (torch.randn(2, 4) * 0.3,)  # noqa: E731
        data = [batch(), batch(), add, batch(), batch(), remove, batch(), batch()]
        return step, data, lambda: list(model.parameters())

    check(build)


def test_a_lambda_is_a_step():
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    step = nova.jit(lambda x: layer(x).detach())
    for _ in range(3):
        torch.testing.assert_close(step(x), layer(x).detach())


@pytest.mark.parametrize("leaf_first", [False, True])
def test_a_gradient_may_not_leave_the_step(leaf_first):
    """An input computed outside that requires grad: eager's backward would go on into what computed it."""
    w, m = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 3)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)

    @nova.jit
    def step(x):
        loss = m(x).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    if leaf_first:
        step(torch.randn(2, 4, requires_grad=True))
        step(torch.randn(2, 4, requires_grad=True))
    before = [p.detach().clone() for p in m.parameters()]
    with pytest.raises(CaptureError, match=r"(?s)computed outside.*detach.*line \d+"):
        step(torch.randn(2, 4) * w)
    assert w.grad is None and all(torch.equal(a, b) for a, b in zip(before, m.parameters()))
    step((torch.randn(2, 4) * w).detach())


CHECKED = {
    "inverse": (torch.linalg.inv, torch.eye(3), torch.zeros(3, 3)),
    "solve": (lambda a: torch.linalg.solve(a, torch.ones(3)), torch.eye(3), torch.zeros(3, 3)),
    "cholesky": (torch.linalg.cholesky, torch.eye(3), -torch.eye(3)),
    "assertion": (lambda a: (torch._assert_async(a.sum() > 0, "negative"), a * 2)[1], torch.eye(3), -torch.eye(3)),
    "input": (lambda a: F.binary_cross_entropy(a, torch.ones(4)), torch.rand(4), torch.tensor([0.5, 1.5, 0, 1])),
    "target": (lambda a: F.binary_cross_entropy(torch.ones(4), a), torch.ones(4), torch.tensor([0.5, math.nan, 0, 1])),
    "one hot": (lambda a: F.one_hot(a.long(), 3), torch.ones(4), torch.full((4,), 3.0)),
    "one hot by keywords": (
        lambda a: F.one_hot(input=a.long(), num_classes=3),
        torch.ones(4),
        torch.full((4,), 3.0),
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_of_values_is_made_on_every_call(name):
    """Also where it has no result that anything could need."""
    function, good, bad = CHECKED[name]
    step = nova.jit(lambda a: function(a) + 0)
    for _ in range(2):
        torch.testing.assert_close(step(good), function(good))
    with pytest.raises(RuntimeError):
        step(bad)
    torch.testing.assert_close(step(good), function(good))
    assert step.captures == 1


def test_a_negative_variance_raises_as_in_eager():
    step, x, y = nova.jit(lambda x, y, var: F.gaussian_nll_loss(x, y, var=var)), torch.zeros(3), torch.ones(3)
    for _ in range(2):
        torch.testing.assert_close(step(x, y, y), F.gaussian_nll_loss(x, y, y))
    with pytest.raises(ValueError, match="var has negative"):
        step(x, y, torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.parametrize("shape", [(3,), (3, 2, 2)])
def test_a_bad_label_raises_as_in_eager(shape):
    step, x = nova.jit(F.nll_loss), torch.randn(3, 4, *shape[1:])
    step(x, torch.ones(shape, dtype=torch.int64))
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        step(x, torch.full(shape, 9))


@pytest.mark.parametrize(("argument", "advice"), [
    (torch.ones(3, dtype=torch.complex64).conj(), r"resolve_conj\(\)"), (torch._neg_view(torch.ones(3)), r"resolve_neg\(\)"),
])  # fmt: skip
def test_a_lazy_argument_is_refused_with_advice(argument, advice):
    step = nova.jit(lambda x: x * 2)
    step(torch.ones_like(argument))
    with pytest.raises(ValueError, match=advice):
        step(argument)


def test_a_gradient_is_not_looked_for_where_there_can_be_none():
    """PyTorch warns where one asks for the `.grad` of what was computed."""

    @nova.jit
    def step(x):
        loss = (x * 2).sum()
        loss.backward()
        return loss.detach()

    leaf = torch.ones(3, requires_grad=True)
    for _ in range(3):
        step(leaf)
    with warnings.catch_warnings(), pytest.raises(CaptureError, match="computed outside"):
        warnings.simplefilter("error")
        step(leaf * 2)


UNASKED = {
    "nll_loss": (lambda y, t: F.nll_loss(y.log_softmax(1), t), torch.tensor([0, 2]), torch.tensor([0, 7])),
    "nll_loss of images": (
        lambda y, t: F.nll_loss(y.log_softmax(1)[..., None], t, reduction="sum"),
        torch.tensor([[0], [2]]), torch.tensor([[-1], [2]]),
    ),
    "cross_entropy": (F.cross_entropy, torch.tensor([0, 2]), torch.tensor([0, 3])),
    "binary_cross_entropy": (
        lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), torch.rand(2, 3), torch.full((2, 3), 1.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNASKED)
def test_a_bad_target_is_found_where_nobody_asks_for_the_loss(name):
    """The gradient is all that is left of it."""
    function, good, bad = UNASKED[name]
    model = torch.nn.Linear(4, 3)

    @nova.jit
    def step(x, target):
        model.weight.grad = None
        function(model(x), target).backward()
        return model.weight.grad * 1

    x = torch.randn(2, 4)
    for _ in range(2):
        step(x, good)
    with pytest.raises((IndexError, RuntimeError)):
        step(x, bad)
    with pytest.raises((IndexError, RuntimeError)):
        function(model(x), bad)


@pytest.mark.parametrize("make", [
    lambda: torch.eye(3).to_sparse_csr(), lambda: torch.eye(3).to_mkldnn(),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
], ids=["csr", "mkldnn", "nested", "jagged"])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_strides_is_refused_by_name(make, monkeypatch, tmp_path):
    monkeypatch.setenv("NOVA_CACHE", str(tmp_path))  # a key for the disk is made of strides too
    with pytest.raises(UnsupportedError, match="cannot be an input of the step"):
        nova.jit(lambda x: x * 2)(make())


PARAMETERS = {
    "bernoulli_": (lambda v: torch.zeros(4).bernoulli_(v), 0.5, -1.0),
    "uniform_": (lambda v: torch.zeros(4).uniform_(2.0, 2.0 + v), 0.5, -1.0),
    "normal_": (lambda v: torch.zeros(4).normal_(0.0, v), 0.5, -1.0),
    "normal": (lambda v: torch.normal(0.0, v, (4,)), 0.5, -1.0),
    "exponential_": (lambda v: torch.zeros(4).exponential_(v), 0.5, -1.0),
    "log_normal_": (lambda v: torch.zeros(4).log_normal_(1.0, v), 0.5, -1.0),
    "cauchy_": (lambda v: torch.zeros(4).cauchy_(0.0, v), 0.5, -1.0),
    "geometric_": (lambda v: torch.zeros(4).geometric_(v), 0.5, 3.0),
    "bernoulli of a tensor": (torch.bernoulli, torch.full((3,), 0.5), torch.full((3,), 2.0)),
    "bernoulli_ of a tensor": (lambda p: torch.zeros(3).bernoulli_(p), torch.ones(3), -torch.ones(3)),
    "normal of a tensor": (lambda p: torch.normal(torch.zeros(3), p), torch.ones(3), -torch.ones(3)),
    "multinomial": (lambda p: torch.multinomial(p, 1), torch.ones(3), torch.tensor([1.0, -1.0, 2.0])),
    "multinomial of nothing": (lambda p: torch.multinomial(p, 1), torch.ones(3), torch.zeros(3)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_distribution_without_meaning_is_eagers_error(name):
    function, good, bad = PARAMETERS[name]
    step = nova.jit(lambda v: function(v) + 0)
    step(good), step(good)
    with pytest.raises(RuntimeError) as eager:
        function(bad)
    with pytest.raises(RuntimeError) as found:
        step(bad)
    assert str(found.value).splitlines()[0] in str(eager.value)
