"""`nova.jit` as a decorator: what it wraps, when it stays out of the way, threads, copies, options."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import signal
import threading
import time
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import nova
from nova.errors import NovaError

interpreted = functools.partial(nova.jit, backend="interpret")


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def train(model, optimizer):
    def step(x):
        """One step."""
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_bare_and_with_options():
    @nova.jit
    def bare(x):
        return x

    @nova.jit(precision="bf16", on_unsupported="error")
    def optioned(x):
        """Doc."""
        return x

    assert bare.__name__ == "bare" and bare.options == nova.Options()
    assert optioned.options.precision == "bf16" and optioned.__doc__ == "Doc."
    assert nova.jit(optioned).options == nova.Options(), "decorating again decorates the function"
    assert "optioned" in repr(optioned)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"precison": "bf16"}, "precison"),
        ({"precision": "int4"}, "int4"),
        ({"on_unsupported": "warn"}, "on_unsupported"),
    ],
)
def test_wrong_options(given, words):
    with pytest.raises((TypeError, ValueError), match=words):
        nova.jit(**given)


def test_not_callable_and_class():
    with pytest.raises(TypeError, match="callable"):
        nova.jit(3)
    with pytest.raises(TypeError, match="decorate the step method"):
        nova.jit(nn.Linear)


class Trainer:
    def __init__(self, seed, rate=0.1):
        self.model, self.rate = linear(seed), rate
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    def plain(self, x):
        return train(self.model, self.optimizer)(x)

    @interpreted()
    def step(self, x, *, scale=1.0):
        return train(self.model, self.optimizer)(x) * scale

    @staticmethod
    @interpreted()
    def helper(x):
        return x + 1

    @classmethod
    @interpreted()
    def build(cls, x):
        return x * 2

    def __call__(self, x):
        return self.plain(x)


def test_methods_of_several_instances():
    a, b, c, d = (Trainer(seed) for seed in (0, 1, 0, 1))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(a.step(x), c.plain(x))
        torch.testing.assert_close(b.step(x, scale=2.0), d.plain(x) * 2)
    for p, q in zip([*a.model.parameters(), *b.model.parameters()], [*c.model.parameters(), *d.model.parameters()]):
        torch.testing.assert_close(p, q)
    assert a.step.__func__ is Trainer.step
    torch.testing.assert_close(Trainer.helper(torch.ones(2)), torch.full((2,), 2.0))
    torch.testing.assert_close(Trainer.build(torch.ones(2)), torch.full((2,), 2.0))


def test_second_instance_of_the_same_shape_does_not_capture():
    before = Trainer.step.captures
    trainers = [Trainer(seed) for seed in range(3)]
    for trainer in trainers * 2:
        trainer.step(torch.ones(2, 4))
    assert Trainer.step.captures - before <= 1


@pytest.mark.parametrize("kind", ["object", "bound", "partial", "module", "wrapped"])
def test_callables(kind):
    def reference():
        return Trainer(3)

    def make(trainer):
        if kind == "object":
            return trainer
        if kind == "bound":
            return trainer.plain
        if kind == "partial":
            return functools.partial(lambda t, x, k: t.plain(x) * k, trainer, k=2.0)
        if kind == "module":
            return trainer.model

        @functools.wraps(trainer.plain)
        def wrapped(*args, **kwargs):
            return trainer.plain(*args, **kwargs)

        return wrapped

    eager, compiled = make(reference()), interpreted(make(reference()))
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), eager(x).detach())
    assert compiled.captures == 1


Pair = namedtuple("Pair", "a b")


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    kind: str = "train"


def test_structured_arguments_and_results():
    model = linear()

    def step(batch, extra):
        out = model(batch.x).sum() + batch.y.sum() * extra["w"][0] + extra["n"]
        return Pair(out.detach(), [Batch(out.detach() * 2, batch.y, batch.kind), {"k": (None, 3, "s")}])

    compiled = interpreted(step)
    for i in range(4):
        batch, extra = Batch(torch.randn(2, 4), torch.randn(3)), {"w": [torch.tensor(float(i))], "n": 1}
        want, got = step(batch, extra), compiled(batch, extra)
        assert type(got) is Pair and type(got.b[0]) is Batch and got.b[1] == {"k": (None, 3, "s")}
        torch.testing.assert_close(got.a, want.a)
        torch.testing.assert_close(got.b[0].x, want.b[0].x)
        assert got.b[0].y is batch.y, "an argument that is returned is itself"
    assert compiled.captures == 1
    compiled(Batch(torch.randn(2, 4), torch.randn(3), "other"), {"w": [torch.tensor(1.0)], "n": 1})
    assert compiled.captures == 2


def test_returned_parameter_is_the_parameter():
    model = linear()

    @interpreted()
    def step(x):
        with torch.no_grad():
            model.weight.add_(x)
        return model.weight, x

    for _ in range(3):
        x = torch.ones(2, 4)
        weight, same = step(x)
        assert weight is model.weight and same is x


def test_disable_and_environment(monkeypatch):
    step = interpreted(train(linear(), torch.optim.SGD([torch.zeros(1)], lr=0.1)))
    x = torch.ones(2, 4)
    with nova.disable():
        step(x)
    assert step.captures == 0
    off = nova.disable()
    step(x)
    off.enable()
    assert step.captures == 0
    eagerly = nova.disable(lambda: step(x))
    eagerly()
    assert step.captures == 0
    step(x)
    assert step.captures == 1
    monkeypatch.setenv("NOVA", "0")
    other = interpreted(lambda x: x + 1)
    other(x)
    assert other.captures == 0


def test_step_inside_a_step_runs_inline():
    model = linear()
    inner = interpreted(lambda x: model(x).sum())

    @interpreted()
    def outer(x):
        loss = inner(x) * 2
        loss.backward()
        grad, model.weight.grad, model.bias.grad = model.weight.grad, None, None
        return loss.detach(), grad

    for _ in range(3):
        loss, grad = outer(torch.ones(3, 4))
        assert float(grad[0, 0]) == 6.0
    assert inner.captures == 0 and outer.captures == 1
    inner(torch.ones(3, 4))
    assert inner.captures == 1


def test_deepcopy_and_pickle():
    trainer = Trainer(0)
    trainer.own = interpreted(trainer.plain)
    trainer.own(torch.ones(2, 4))
    trainer.own(torch.ones(2, 4))
    twin = copy.deepcopy(trainer)
    assert twin.own.function.__self__ is twin and twin.own.captures == 0
    before = trainer.model.weight.detach().clone()
    twin.own(torch.ones(2, 4))
    torch.testing.assert_close(trainer.model.weight.detach(), before)
    assert not torch.equal(twin.model.weight, before)
    model = pickle.loads(pickle.dumps(trainer.model))
    torch.testing.assert_close(model.weight, trainer.model.weight)
    assert set(vars(trainer.model)) == set(vars(linear())), "nothing is attached to the user's objects"
    again = pickle.loads(pickle.dumps(interpreted(module_level)))
    assert again(torch.ones(2)).tolist() == [2.0, 2.0]


def module_level(x):
    return x + 1


def test_threads_share_one_step():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(())

    @interpreted()
    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total.add_(1.0)
        return loss.detach()

    errors = []

    def work():
        try:
            for _ in range(10):
                step(torch.ones(2, 4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and step.captures == 1
    reference, other = linear(), None
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(40):
        train_sum(reference, other)
    torch.testing.assert_close(model.weight, reference.weight)
    assert float(total) == 40.0


def test_threads_record_at_once():
    """Steps that several threads record at once, beside an eager one, are all what they are alone."""

    def work(seed, model, found):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def step(x):
            time.sleep(0.01)  # the other threads' turn
            loss = model(x).square().sum() * math.sqrt(2.0)
            loss.backward()
            time.sleep(0.01)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return loss.detach()

        run = step if seed == 3 else interpreted(step)
        losses = [run(torch.ones(2, 4)).item() for _ in range(3 if seed < 3 else 40)]
        found[seed] = losses, [p.tolist() for p in model.parameters()], getattr(run, "captures", 1)

    alone, together = {}, {}
    for seed in range(4):
        work(seed, linear(), alone)
    threads = [threading.Thread(target=work, args=(seed, linear(), together)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and all(captures == 1 for _, _, captures in alone.values())


def test_a_model_that_is_collected_while_its_guards_are_looked_at_matches_nothing():
    """Garbage may be collected anywhere, also in the guards of a model that is no longer used."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = interpreted(train(model, optimizer))
    for _ in range(2):
        step(torch.ones(2, 4))
    (binding,) = step._variants[0].bindings

    def collected():
        binding._dropped(None)
        raise IndexError

    binding.space["repair"] = collected
    model.note = 1  # something that is watched changes
    before = model.weight.detach().clone()
    step(torch.ones(2, 4))
    assert binding.gone and not torch.equal(model.weight, before)


@pytest.fixture
def interruptible():
    """A shell that starts this in the background has it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "patched", [torch.nn.Module, torch.optim.Adam, torch.optim.Optimizer], ids=lambda c: c.__name__
)
def test_an_interrupt_leaves_pytorch_as_it_was(patched, monkeypatch):
    """Ctrl-C while PyTorch is being patched for a recording: the user's code gets it, and the patches go."""
    from nova.capture import patching

    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before, methods = model.weight.detach().clone(), dict(vars(patched))

    def interrupted(owner, name, value, sent=[]):
        setattr(owner, name, value)
        if owner is patched and not sent:
            sent.append(name)
            signal.raise_signal(signal.SIGINT)

    step = interpreted(train(model, optimizer))
    with monkeypatch.context() as patch:
        patch.setattr(patching, "setattr", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            step(torch.ones(2, 4))
    assert dict(vars(patched)) == methods and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert torch.equal(model.weight, before) and model.weight.grad is None and not optimizer.state
    step(torch.ones(2, 4))
    assert step.captures == 1 and not torch.equal(model.weight, before)


def train_sum(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_evaluation_under_no_grad_and_inference():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    evaluate = interpreted(lambda x: model(x).sum())
    for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            x = torch.randn(3, 4)
            torch.testing.assert_close(evaluate(x), model(x).sum())


def test_errors_of_a_backend_leave_the_state(monkeypatch):
    from nova.capture import interpret

    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    class Broken:
        def __init__(self, step):
            raise nova.CompileError("a pass is broken")

    step = interpreted(train(model, optimizer))
    with monkeypatch.context() as patch:
        patch.setattr(interpret, "Interpreted", Broken)
        with pytest.raises(NovaError, match="a pass is broken"):
            step(torch.ones(2, 4))
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    assert not optimizer.state and model.weight.grad is None
    step(torch.ones(2, 4))
    assert not torch.equal(model.weight, before)


def test_profilers_and_tracers_survive():
    import cProfile
    import sys

    step = interpreted(train(linear(), torch.optim.SGD([torch.zeros(1)], lr=0.1)))
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(event) if len(seen) < 5 else None)
    try:
        hook = sys.getprofile()
        step(torch.ones(2, 4))
        assert sys.getprofile() is hook
    finally:
        sys.setprofile(None)
    profiler = cProfile.Profile()
    other = interpreted(train(linear(), torch.optim.SGD([torch.zeros(1)], lr=0.1)))
    profiler.runcall(other, torch.ones(2, 4))


def test_import_is_light():
    import subprocess
    import sys

    code = (
        "import sys, nova; assert 'torch' not in sys.modules and 'llvmlite' not in sys.modules; print(nova.__version__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == nova.__version__


def test_functions_keep_their_names_beside_modules():
    import nova.capture.session  # noqa: F401

    assert callable(nova.jit) and nova.jit.__name__ == "jit"
    assert callable(nova.capture) and nova.capture.__name__ == "capture"


def test_guards_do_not_keep_a_model_alive():
    import gc
    import weakref

    @interpreted()
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    gone = []
    for seed in range(3):
        model = linear(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer, torch.ones(2, 4))
        gone += [weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)]
    assert step.captures == 1
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 9
    assert not step._variants[0].bindings


def test_random_generator_is_left_alone():
    model = linear()
    step = interpreted(lambda x: model(x).sum())
    state = torch.get_rng_state()
    for _ in range(3):
        step(torch.ones(2, 4))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("backend", ["interpret", "compile"])
@pytest.mark.parametrize(
    "window",
    [
        lambda t: t[:, 1:-2],
        lambda t: t[1:, ::2],
        lambda t: t.t()[2:4],
        lambda t: t[1].expand(3, 8),
        lambda t: t.flatten()[3:].as_strided((2, 3), (5, 2), 4),
        lambda t: t.unfold(1, 3, 2)[1:],
    ],
)
def test_windows_with_holes_that_start_inside_their_memory(window, backend):
    """Each call brings other memory; some are also written to."""

    @nova.jit(backend=backend)
    def read(x):
        return x * 2, x[..., 1:].sum()

    @nova.jit(backend=backend)
    def write(x):
        x.select(-1, 1).mul_(3.0)
        return x + 1

    for k in range(3):
        base = torch.arange(32.0).view(4, 8) + k
        x = window(base)
        for got, wanted in zip(read(x), read.function(x), strict=True):
            torch.testing.assert_close(got, wanted)
        if not x.stride(0) or x.dim() == 3:
            continue  # eager refuses writes to memory that overlaps itself
        copy = base.clone()
        torch.testing.assert_close(write(x), write.function(window(copy)))
        torch.testing.assert_close(base, copy)
