"""Steps on the simulated GPU that find a bad value: nothing of theirs takes effect, and the next good one is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nova
from nova.runtime.step_plan import GUARDED_COPY, KernelCall
from nova.schedule import target
from tests.simulated.test_whole_steps import simulated  # noqa: F401  (a fixture)

CLASSES = 5


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """Grids that follow the number of processors are small."""
    monkeypatch.setitem(target.PRESETS, "h200", dataclasses.replace(target.PRESETS["h200"], sms=2))


class Net(nn.Module):
    """Batch norm's statistics are written long before the labels are looked at."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def training(make_model, make_optimizer, accumulate=False):
    """A step that trains, and all of its state."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    if accumulate:  # gradients live between steps, and each step adds to them
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not accumulate:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def state():
        found = {f"model.{k}": v for k, v in model.state_dict().items()}
        found |= {f"grad.{k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
        for i, entries in enumerate(optimizer.state.values()):
            found |= {f"{i}.{k}": v for k, v in entries.items() if isinstance(v, torch.Tensor)}
        return {k: v.detach().clone() for k, v in found.items()}

    return step, state


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(7, 6, generator=generator), torch.randint(0, CLASSES, (7,), generator=generator))
        for _ in range(count)
    ]


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def close(a, b):
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


def bad(batch):
    x, y = batch
    y = y.clone()
    y[3] = 77
    return x, y


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_bad_labels_change_nothing(simulated, optimizer, accumulate):  # noqa: F811
    simulated.driver.ordered, simulated.driver.is_late = False, True
    plain, plain_state = training(Net, optimizer, accumulate)
    compiled, state = training(Net, optimizer, accumulate)
    compiled = nova.jit(compiled)
    good = batches()
    for batch in good[:2]:
        plain(*batch), compiled(*batch)
    before = state()
    compiled(*bad(good[2]))
    compiled(*good[2])  # launched before the host has looked: as in eager, where the exception came before it
    with pytest.raises(IndexError, match=r"(?s)Target 77 is out of bounds.*loss = F.cross_entropy") as caught:
        nova.synchronize()
    assert "earlier call" in caught.value.__notes__[0]
    same(state(), before)
    assert float(compiled(*good[2])) == pytest.approx(float(plain(*good[2])), rel=1e-4)
    nova.synchronize()
    close(state(), plain_state())
    assert compiled.captures == 1


class Words(nn.Module):
    """An embedding: its indices are checked forward and, again, where its gradient is added up."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(self.table(x))


def words(count=3):
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, n, (7,), generator=generator) for n in (9, CLASSES)) for _ in range(count)]


def deferred(step) -> int:
    """Tensors of state that a compiled step copies into place at its end."""
    items = step._variants[0].executable.plan.items
    return sum(item.slots[1] for item in items if isinstance(item, KernelCall) and item.symbol == GUARDED_COPY)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_bad_index_of_an_embedding_changes_nothing(simulated, accumulate):  # noqa: F811
    simulated.driver.ordered = False
    plain, plain_state = training(Words, adamw, accumulate)
    compiled, state = training(Words, adamw, accumulate)
    compiled = nova.jit(compiled)
    good = words()
    for batch in good[:2]:
        plain(*batch), compiled(*batch)
    before = state()
    compiled(bad(good[2][::-1])[1], good[2][1])
    with pytest.raises(IndexError, match=r"(?s)index 77 is out of range .* size 9.*self.table\(x\)"):
        compiled(*good[2])
    same(state(), before)
    plain(*good[2]), compiled(*good[2])
    nova.synchronize()
    close(state(), plain_state())
    # The table's gradient repeats a check, so it is added to in place, as all others are but one: the last bias's is
    # made by the kernel that looks at the labels.
    assert deferred(compiled) == accumulate


def test_probabilities_out_of_range_change_nothing(simulated):  # noqa: F811
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = adamw(model.parameters())

    @nova.jit
    def step(x, y):
        loss = F.binary_cross_entropy(model(x).squeeze(1).sigmoid(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x, y = torch.randn(7, 6), torch.rand(7)
    step(x, y), step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (1.5, torch.nan):
        step(x, torch.cat([y[:6], torch.tensor([bad])]))
        with pytest.raises(RuntimeError, match=r"(?s)should be between 0 and 1.*loss = F.binary_cross_entropy"):
            nova.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(x, y)
    nova.synchronize()
    assert not torch.equal(before[0], model.weight)


def test_only_state_that_is_made_before_the_last_check_waits_for_the_end(simulated):  # noqa: F811
    compiled, _ = training(Net, momentum)
    compiled = nova.jit(compiled)
    for batch in batches(2):
        compiled(*batch)
    assert deferred(compiled) == 3  # batch norm's two statistics and its count


def test_a_write_that_checks_its_own_index_is_as_good(simulated):  # noqa: F811
    simulated.driver.ordered = False
    memory = torch.zeros(6, 3)

    @nova.jit
    def step(index, rows):
        memory.index_put_((index,), rows)
        return rows.sum()

    index, rows = torch.tensor([1, 4]), torch.ones(2, 3)
    step(index, rows)
    step(index, 2 * rows)
    nova.synchronize()
    want = memory.clone()
    assert want.sum() == 12
    step(torch.tensor([2, 6]), rows)
    with pytest.raises(IndexError, match="index 6 is out of bounds for dimension 0 with size 6"):
        nova.synchronize()
    assert torch.equal(memory, want)
    step(torch.tensor([2, 5]), rows)
    nova.synchronize()
    assert memory.sum() == 18


def test_steps_without_checks_are_as_they_were():
    """No guard, no check of records, no copy at the end."""
    model = Net()
    optimizer = adamw(model.parameters())

    def step(x, y, loss):
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    x, labels = batches(1)[0]
    regression = nova.capture(step, x, torch.randn(7, CLASSES), F.mse_loss).lower("h200").as_text()
    assert "nova.donates" in regression and "nova.guarded" not in regression
    lowered = nova.capture(step, x, labels, F.cross_entropy).lower("h200")
    guarded_kernels = [k for k in lowered.kernels if "nova.guarded" in k.levels["configure"]]
    assert {"multi_tensor"} <= {k.kind for k in guarded_kernels}
    assert not any("nova.raises" in k.levels["configure"] for k in guarded_kernels)
    assert "nova.guarded" not in nova.capture(step, x, labels, F.cross_entropy).lower("cpu").as_text()
