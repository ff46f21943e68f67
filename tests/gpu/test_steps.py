"""Whole training steps on a GPU against eager on the same GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nova
from tests import models


def close(eager, compiled, rtol=1e-3, atol=1e-4):
    assert eager.keys() == compiled.keys()
    for key, value in eager.items():
        assert value.device == compiled[key].device, key
        torch.testing.assert_close(compiled[key], value, rtol=rtol, atol=atol, msg=lambda m: f"{key}: {m}")


def linear_case(optimizer, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).cuda()
    opt = optimizer(model.parameters(), lr=1e-2, **settings)
    batches = [(torch.randn(19, 33, device="cuda"), torch.randint(7, (19,), device="cuda")) for _ in range(6)]
    return model, opt, batches


@pytest.mark.parametrize(
    "settings", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}, {"foreach": False}, {"amsgrad": True}]
)
def test_adamw_in_every_form(settings):
    """Step counts stay where eager keeps them: on the CPU, or on the GPU for fused and capturable ones."""
    states = []
    for transform in (lambda f: f, nova.jit):
        model, opt, batches = linear_case(torch.optim.AdamW, **settings)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            return loss

        run = transform(step)
        for batch in batches:
            run(*batch)
            scheduler.step()
        nova.synchronize()
        states.append(models.named_state([model], [opt]))
    close(*states)


def test_gradients_accumulate_over_calls():
    grads = []
    for transform in (lambda f: f, nova.jit):
        model, opt, batches = linear_case(torch.optim.SGD, momentum=0.9)

        @transform
        def micro(x, y):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            return loss.detach()

        @transform
        def last(x, y):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        losses = []
        for i in range(0, 6, 2):
            losses += [micro(*batches[i]), last(*batches[i + 1])]
        grads.append(({str(i): v for i, v in enumerate(losses)}, models.named_state([model], [opt])))
    close(grads[0][0], grads[1][0])
    close(grads[0][1], grads[1][1])


def test_autocast_with_a_gradient_scaler():
    states = []
    for transform in (lambda f: f, nova.jit):
        model, opt, batches = linear_case(torch.optim.AdamW, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

        def step(x, y):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            return loss

        run = transform(step)
        for batch in batches:
            run(*batch)
        states.append(models.named_state([model], [opt]) | {"scale": scaler._scale})
    close(*states, rtol=2e-2, atol=2e-3)


def test_a_batch_on_the_cpu_and_a_loss_for_the_cpu():
    results = []
    for transform in (lambda f: f, nova.jit):
        model, opt, batches = linear_case(torch.optim.SGD)

        def step(x, y):
            loss = F.cross_entropy(model(x.cuda()), y.to("cuda"))
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach().cpu()

        run = transform(step)
        results.append([run(x.cpu(), y.cpu()) for x, y in batches])
    assert all(loss.device.type == "cpu" for loss in results[1])
    torch.testing.assert_close(torch.stack(results[1]), torch.stack(results[0]), rtol=1e-4, atol=1e-5)


def test_dropout_follows_the_seed():
    def losses():
        model, opt, batches = linear_case(torch.optim.SGD)
        model = nn.Sequential(model, nn.Dropout(0.5))

        @nova.jit
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        torch.manual_seed(3)
        return torch.stack([step(*batch) for batch in batches])

    first, second = losses(), losses()
    assert torch.equal(first, second) and first.unique().numel() == 6


@pytest.mark.parametrize("precision, bound", [("highest", 2e-6), ("high", 2e-3)])
def test_tf32_exactly_where_pytorch_allows_it(precision, bound):
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 128, device="cuda")
    step = nova.jit(lambda a, b: a @ b)
    step(a, b)
    exact = a.double() @ b.double()
    error = (step(a, b).double() - exact).abs().max() / exact.abs().max()
    assert error < bound and (error > 1e-5) == (precision == "high")


def test_steps_follow_the_current_stream():
    model, opt, batches = linear_case(torch.optim.SGD)
    reference = copy.deepcopy(model)

    @nova.jit
    def step(x):
        return model(x).square().mean()

    x, _ = batches[0]
    step(x)
    side = torch.cuda.Stream()
    slow = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        slow.copy_(x)
        on_side = step(slow)
    here = step(x)  # waits for the arena, not for the data
    torch.cuda.current_stream().wait_stream(side)
    want = reference(x).square().mean()
    torch.testing.assert_close(on_side, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(here, want, rtol=1e-4, atol=1e-5)
