"""What a recorded step means: views and writes, gradients, numbers, random draws, outputs, whole operations."""

import dataclasses
import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from capture_checks import agree, run
from capture_replay import Replayed
from replay_case import interpreted
from torch import nn
from torch.utils.checkpoint import checkpoint

import nova
from nova.capture.record import record
from nova.errors import CaptureError


def simple(step, data, state=lambda: []):
    return lambda: (step, data, state)


# ---- views and writes ------------------------------------------------------------------------------------------

WRITES = {
    "row": lambda x: x[1].add_(1),
    "column": lambda x: x[:, 2].mul_(3),
    "block": lambda x: x[1:3, ::2].sub_(2),
    "transposed": lambda x: x.t()[0].zero_(),
    "flattened": lambda x: x.view(-1)[3:9].copy_(torch.arange(6.0)),
    "diagonal": lambda x: x.diagonal().fill_(7),
    "strided": lambda x: x.as_strided((3, 2), (2, 7), 1).exp_(),
    "setitem": lambda x: x.__setitem__((slice(None), 1), torch.ones(4)),
    "masked": lambda x: x.__setitem__(x > 0, 5.0),
    "indexed": lambda x: x.__setitem__(torch.tensor([0, 2]), torch.zeros(2, 6)),
    "whole": lambda x: x.copy_(torch.ones(6)),
    "unbound": lambda x: x.unbind(0)[2].add_(1),
    "split": lambda x: x.split(2, 1)[1].add_(1),
    "narrowed": lambda x: x.narrow(1, 2, 3).clamp_(max=0.1),
    "squeezed": lambda x: x[:, None].squeeze(1)[0].add_(2),
    "unfolded": lambda x: x.unflatten(1, (2, 3))[:, 1].add_(1),
    "swapped": lambda x: x.transpose_(0, 1)[2].add_(5) * 0 + x.transpose_(0, 1).sum(),
    "out": lambda x: torch.mul(x[0], 2, out=x[1]),
    "foreach": lambda x: torch._foreach_add_([x[0], x[3]], 2.0),
    "chunks": lambda x: torch._foreach_mul_(list(x.chunk(3, 1)), [1.0, 2.0, 3.0]),
    "scatter": lambda x: x.scatter_(1, torch.zeros(4, 2, dtype=torch.long), 9.0),
    "index_add": lambda x: x.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 6)),
    "mixed types": lambda x: x.add_(torch.arange(6)),
    "bits": lambda x: x.view(torch.int32).bitwise_and_(-2),
    "triu": lambda x: x.triu_(),
    "lerp": lambda x: x[0].lerp_(x[1], 0.3),
    "real": lambda x: torch.view_as_complex(x.view(4, 3, 2)).mul_(1j),
}


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "input"])
@pytest.mark.parametrize("write", WRITES)
def test_write_through_a_view(write, inside):
    def step(x, y):
        x = x * 1 if inside else x
        before = x[1] + 0
        window = x[:, 1:3]
        WRITES[write](x)
        return x + 0, window + 0, before, x.sum(0), y

    def build():
        data = [(torch.randn(4, 6), torch.ones(1)) for _ in range(3)]
        return step, data, lambda: [t for d in data for t in d]

    agree(build)


def test_low_precision_target_keeps_its_type():
    def step(x, y):
        x = x * 1
        return x.mul_(y).add_(1), torch.zeros(3, dtype=torch.bfloat16).copy_(y[0])

    agree(simple(step, [(torch.randn(3, 3).bfloat16(), torch.randn(3, 3)) for _ in range(2)]))


def test_overlapping_inputs():
    def build():
        flat = torch.randn(40)
        a, b = flat[:24].view(4, 6), flat[12:36].view(6, 4)

        def step(x):
            a.add_(x)
            c = b * 2
            b[0] = 1.0
            return a + 0, c, flat[30] + 0

        return step, [(torch.tensor(float(i)),) for i in range(3)], lambda: [flat, a, b]

    agree(build)


def test_strided_and_expanded_inputs():
    def step(x, y, z):
        x.mul_(2)
        return x.t() @ y, y[0] + z

    def build():
        data = [
            (torch.randn(6, 4).t(), torch.randn(1, 6).expand(4, 6), torch.randn(8, 12)[::2, ::2][0]) for _ in range(3)
        ]
        return step, data, lambda: [d[0] for d in data]

    agree(build)


def test_channels_last_output_keeps_its_strides():
    def step(x):
        return (x.contiguous(memory_format=torch.channels_last) * 2), x.permute(0, 2, 3, 1) + 1

    agree(simple(step, [(torch.randn(2, 3, 4, 5),) for _ in range(2)]))


def test_data_swap():
    def build():
        a, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def step(x):
            a.data, b.data = b.data, a.data
            b.data.mul_(x)
            return (a * x).sum().detach()

        return step, [(torch.tensor(float(i + 1)),) for i in range(4)], lambda: [a, b]

    agree(build)


def test_data_as_the_way_to_write():
    def build():
        w = nn.Parameter(torch.randn(4, 3))

        def step(x):
            w.data.view(-1)[2:5].mul_(x)
            w.data.add_(1)
            return w.detach().sum()

        return step, [(torch.tensor(float(i + 1)),) for i in range(3)], lambda: [w]

    agree(build)


def test_sizes_that_depend_on_data():
    def build():
        w = nn.Parameter(torch.randn(6))

        def step(x, y):
            w.grad = None
            rows = x[y > 0]
            picked = torch.masked_select(x, x > 0)
            where = torch.nonzero(y > 0).squeeze(1)
            loss = (rows * w).sum() + picked.square().mean() + (x.index_select(0, where) @ w).sum()
            loss = (
                loss
                + (rows * w).mean()
                + (rows * w).exp().mean(0).sum()
                + (rows * w).mean(1).sum()
                + F.layer_norm(rows * w, (6,)).square().mean()
            )
            loss.backward()
            return loss.detach(), w.grad.clone(), rows.sum(0).detach() + picked.max()

        return step, [(torch.randn(7, 6), torch.randn(7)) for _ in range(4)], lambda: []

    agree(build)


def test_a_size_that_depends_on_data_is_not_a_python_number():
    with pytest.raises(CaptureError, match="size"):
        record(lambda x: x[x > 0].sum() / x[x > 0].shape[0], (torch.randn(5),), {})


# ---- gradients -------------------------------------------------------------------------------------------------


def parameters():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


GRADIENT_STEPS = {
    "left behind": lambda m, x: (m.zero_grad(), m(x).sum().backward()),
    "accumulated": lambda m, x: m(x).sum().backward(),
    "twice": lambda m, x: (m(x).sum().backward(), m(x).mean().backward(), [p.grad.mul_(0.5) for p in m.parameters()]),
    "zeroed": lambda m, x: (m.zero_grad(set_to_none=False), m(x).sum().backward()),
    "dropped": lambda m, x: (m(x).sum().backward(), m.zero_grad()),
    "grad": lambda m, x: torch.autograd.grad(m(x).sum(), list(m.parameters())),
    "retained": lambda m, x: [y.backward(retain_graph=True) for y in [m(x).sum()] for _ in range(2)],
    "deleted": lambda m, x: (m(x).sum().backward(), [delattr(p, "grad") for p in m[0].parameters()]),
    "assigned": lambda m, x: [setattr(p, "grad", torch.ones_like(p) * x.sum()) for p in m.parameters()],
    "some inputs": lambda m, x: torch.autograd.backward(m(x).sum(), inputs=[m[0].weight]),
}


@pytest.mark.parametrize("kind", GRADIENT_STEPS)
def test_gradients(kind):
    def build():
        m = parameters()

        def step(x):
            out = GRADIENT_STEPS[kind](m, x)
            return [t for t in out if isinstance(t, torch.Tensor)] if isinstance(out, (list, tuple)) else None

        return step, [(torch.randn(3, 4),) for _ in range(4)], lambda: [p.grad for p in m.parameters()]

    agree(build, captures=None)


def test_zero_grad_first_needs_one_capture():
    def build():
        m = parameters()

        def step(x):
            m.zero_grad()
            loss = m(x).sum()
            loss.backward()
            return loss.detach(), [p.grad for p in m.parameters()]

        return step, [(torch.randn(3, 4),) for _ in range(4)], lambda: [p.grad for p in m.parameters()]

    agree(build, captures=1)


def test_gradient_of_an_argument():
    def build():
        x = torch.randn(3, 4, requires_grad=True)
        m = parameters()

        def step(x):
            x.grad = None
            m(x).sum().backward()
            return x.grad

        return step, [(x,), (x,)], lambda: [x.grad]

    agree(build, captures=2)  # the model's own gradients accumulate from the second call on


def test_hooks_and_custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x

    def build():
        def add_one(p):
            p.grad.add_(1)

        m = parameters()
        m[0].weight.register_hook(lambda g: g * 3)
        m[2].bias.register_post_accumulate_grad_hook(add_one)

        def step(x):
            m.zero_grad()
            h = m(x)
            h.register_hook(lambda g: g.clamp(max=0.1))
            Double.apply(h).sum().backward()

        return step, [(torch.randn(3, 4),) for _ in range(3)], lambda: [p.grad for p in m.parameters()]

    agree(build)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    def build():
        m, head = parameters(), nn.Linear(2, 3)

        def step(x, t):
            m.zero_grad()
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(head(checkpoint(m, x, use_reentrant=reentrant)), t)
            loss.backward()
            return loss.detach()

        return (
            step,
            [(torch.randn(3, 4), torch.randint(3, (3,))) for _ in range(3)],
            lambda: [p.grad for p in m.parameters()],
        )

    agree(build, captures=None)


def test_double_backward_through_everything_kept_whole():
    def build():
        q, k, v = (nn.Parameter(torch.randn(2, 2, 5, 4)) for _ in range(3))
        m = nn.Linear(4, 3)

        def step(x, t):
            for p in (q, k, v, *m.parameters()):
                p.grad = None
            with torch.nn.attention.sdpa_kernel(
                torch.nn.attention.SDPBackend.MATH
            ):  # eager's other kernel has no second derivative
                out = F.scaled_dot_product_attention(q * x, k, v, is_causal=True)
            loss = F.cross_entropy(m(F.layer_norm(out, (4,))).flatten(0, 2), t, label_smoothing=0.1)
            (g,) = torch.autograd.grad(loss, q, create_graph=True)
            (g.square().sum() + loss).backward()
            return loss.detach()

        state = lambda: [p.grad for p in (q, k, v, *m.parameters())]
        return step, [(torch.rand(1) + 1, torch.randint(3, (20,))) for _ in range(3)], state

    agree(build, rtol=1e-3, atol=1e-5)


def test_losses_that_check_their_arguments():
    def build():
        w = nn.Parameter(torch.rand(4, 3))

        def step(x):
            w.grad = None
            F.gaussian_nll_loss(x @ w, torch.ones(5, 3), w.square().sum(0).expand(5, 3)).backward()

        return step, [(torch.randn(5, 4),) for _ in range(2)], lambda: [w.grad]

    agree(build)


def test_function_transforms():
    def build():
        w = nn.Parameter(torch.randn(4, 3))

        def step(x):
            g = torch.func.grad(lambda p: (x @ p).sin().sum())(w.detach())
            per_row = torch.func.vmap(torch.func.grad(lambda row, p: (row @ p).square().sum()), (0, None))(
                x, w.detach()
            )
            j = torch.func.jacrev(lambda p: (x @ p).sum(0))(w.detach())
            with torch.no_grad():
                w.sub_(0.1 * g)
            return g, per_row, j

        return step, [(torch.randn(5, 4),) for _ in range(3)], lambda: [w]

    agree(build)


# ---- precision and modes ---------------------------------------------------------------------------------------


def test_autocast():
    def build():
        m = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 24))
        opt = torch.optim.SGD(m.parameters(), lr=0.1)

        def step(x, t):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q, k, v = m(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
                out = F.scaled_dot_product_attention(q, k, v)
                loss = F.cross_entropy(out.reshape(-1, 4), t)
            loss.backward()
            opt.step()
            return loss.detach(), out.detach()

        return step, [(torch.randn(2, 6, 8), torch.randint(4, (24,))) for _ in range(3)], lambda: list(m.parameters())

    agree(build, rtol=2e-2, atol=2e-2)


def test_no_grad_and_inference_mode():
    def build():
        m = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).eval()

        def step(x):
            with torch.inference_mode():
                a = m(x)
            with torch.no_grad():
                return a.clone(), m(x).softmax(-1)

        return step, [(torch.randn(3, 4),) for _ in range(2)], lambda: list(m.buffers())

    agree(build)


def test_transformer_layers():
    def build():
        m = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)

        def step(x, pad):
            m.zero_grad()
            loss = m(x, src_key_padding_mask=pad).square().mean()
            loss.backward()
            return loss.detach()

        pad = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return step, [(torch.randn(2, 5, 8), pad) for _ in range(2)], lambda: [p.grad for p in m.parameters()]

    agree(build)


# ---- numbers ---------------------------------------------------------------------------------------------------

NUMBERS = {
    "mul": lambda x, s: (x * s, s * x, x / s, s / x, x + s, s - x, x - s, x**s),
    "int": lambda x, s: (x.long() * s, x.int() + s),
    "zero-d": lambda x, s: (x[0, 0] * s, s + x.sum()),
    "python": lambda x, s: x * ((1 - s) * 2 + s**2 / 3 - (-s) % 0.3),
    "alpha": lambda x, s: (torch.add(x, x, alpha=s), x.clone().add_(x, alpha=-s), x.clone().sub_(1.0, alpha=s)),
    "fused": lambda x, s: (x.addcmul(x, x, value=s), x.clone().addcdiv_(x, x.exp(), value=s), x.lerp(x + 1, s)),
    "fill": lambda x, s: (torch.full((2,), s), x.new_full((2,), s), torch.full_like(x, s), x.clone().fill_(s)),
    "clamp": lambda x, s: (x.clamp(max=s), x.clamp(-s, s), x.clone().clamp_(min=s)),
    "tensor": lambda x, s: (torch.tensor(s), torch.tensor([s, 1.0])),
    "mask": lambda x, s: (x.masked_fill(x > 0, s), torch.where(x > 0, x, s), torch.where(x > s, s, x)),
    "mask in float64": lambda x, s: (torch.where(x > 0.7, s, x.double()), torch.where(x > 0.7, x.double(), s)),
    "compare": lambda x, s: (x > s, x <= s),
    "math": lambda x, s: x * math.sqrt(s) * math.exp(-s) + math.cos(s),
    "returned": lambda x, s: (s, s * 2, 3, None),
    "foreach": lambda x, s: (
        torch._foreach_mul([x, x], s),
        torch._foreach_lerp([x], [x * 2], s),
        torch._foreach_add([x], [x], alpha=s),
    ),
    "scale": lambda x, s: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=s),
    "half": lambda x, s: x.bfloat16() * s,
    "max": lambda x, s: x * max(s, 0.01),
    "sum": lambda x, s: sum([s, s, 1.0]) * x,
    "setitem": lambda x, s: x.clone().__setitem__((0, 0), s),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_inputs(kind):
    data = [(torch.rand(3, 4) + 0.5, s) for s in (0.5, 0.75, 0.1)]
    agree(simple(NUMBERS[kind], data))


LISTS_THAT_DO_NOT_FIT = {
    "shorter": lambda x, s: torch._foreach_add_([x.clone(), x.clone()], [x]),
    "longer": lambda x, s: torch._foreach_copy_([x.clone()], [x, x]),
    "shorter copy": lambda x, s: torch._foreach_copy_([x.clone(), x.clone()], [x]),
    "numbers": lambda x, s: torch._foreach_mul([x, x], [2.0]),
    "three lists": lambda x, s: torch._foreach_addcmul([x, x], [x], [x, x]),
    "a number each": lambda x, s: torch._foreach_addcdiv([x, x], [x, x], [x, x], torch.ones(3)),
    "one number": lambda x, s: torch._foreach_mul([x, x], torch.ones(2)),
    "nothing": lambda x, s: torch._foreach_add([], []),
    "no norm": lambda x, s: torch._foreach_norm([]),
    "traced numbers": lambda x, s: torch._foreach_mul([x, x], [s]),
    "traced factor": lambda x, s: torch._foreach_add([x], [x, x], alpha=s),
}


@pytest.mark.parametrize("kind", LISTS_THAT_DO_NOT_FIT)
@pytest.mark.parametrize("grad", [True, False])
def test_lists_that_do_not_fit_are_eagers_error(kind, grad):
    function, x = LISTS_THAT_DO_NOT_FIT[kind], torch.ones(4)
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError) as expected:
            function(x, 0.5)
        with pytest.raises(RuntimeError) as found:
            interpreted(function)(x, 0.5)
    assert str(found.value) == str(expected.value)


def test_gradient_through_a_number():
    def build():
        w = nn.Parameter(torch.rand(3) + 1)

        def step(s, t=0.0):
            w.grad = None
            ((w**s) * s + torch.lerp(w, w * w, s) + w.clamp(max=s)).sum().backward()

        return step, [(0.5,), (1.5,), (0.25,)], lambda: [w.grad]

    agree(build)


NEEDS_VALUE = {
    "branch": lambda x, s: x * 2 if s > 0.4 else x,
    "int": lambda x, s: x[: int(s * 4)],
    "format": lambda x, s: (x, f"{s}"),
    "dropout": lambda x, s: F.dropout(x, s, training=False),
    "range": lambda x, s: x.repeat(round(s * 4), 1),
}


@pytest.mark.parametrize("kind", NEEDS_VALUE)
def test_numbers_python_looks_at_are_guarded(kind):
    data = [(torch.rand(3, 4) + 0.5, s) for s in (0.5, 0.5, 0.25, 0.5)]
    agree(simple(NEEDS_VALUE[kind], data), captures=2)


# ---- random draws ----------------------------------------------------------------------------------------------

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "rand": lambda x: torch.rand(3, 4) + torch.rand_like(x),
    "randn": lambda x: torch.randn(3, 4) * torch.randn_like(x),
    "normal": lambda x: torch.normal(0.0, 2.0, (5,)),
    "normal t": lambda x: torch.normal(x, 2.0),
    "randint": lambda x: (torch.randint(5, (7,)), torch.randint(-3, 9, (2, 2))),
    "perm": lambda x: torch.randperm(9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "inplace": lambda x: (
        x.clone().normal_(1, 3),
        x.clone().uniform_(-1, 2),
        x.clone().exponential_(2.0),
        x.clone().bernoulli_(0.3),
    ),
    "multinomial": lambda x: (torch.multinomial(x.abs(), 2), torch.multinomial(x.abs(), 5, replacement=True)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "others": lambda x: (
        torch.poisson(x.abs()),
        x.clone().cauchy_(),
        x.clone().log_normal_(),
        x.clone().geometric_(0.4),
        x.clone().random_(3, 9),
    ),
    "gumbel": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.4),
    "distributions": lambda x: (
        torch.distributions.Gamma(x.abs() + 1, 1.0).sample(),
        torch.distributions.Normal(x, 1.0).rsample(),
    ),
    "init": lambda x: nn.init.xavier_normal_(torch.empty(3, 3)) + nn.init.kaiming_uniform_(torch.empty(3, 3)),
}


class Recorded:
    """Records every call anew: what the recording run itself computes."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return record(self.function, args, {}).result


@pytest.mark.parametrize("kind", DRAWS)
def test_a_replay_draws_what_a_recording_draws(kind):
    def build():
        data = [(torch.randn(3, 4),) for _ in range(3)]
        again = data[1]
        return (
            DRAWS[kind],
            [*data, lambda: torch.manual_seed(5), again, lambda: torch.manual_seed(5), again, again],
            lambda: [],
        )

    recorded, _, _ = run(build, Recorded, 3)
    replayed, _, step = run(build, Replayed, 3)
    assert step.captures == 1
    for a, b in zip(recorded, replayed, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    same = [torch.equal(x, y) for x, y in zip(replayed[-3], replayed[-2], strict=True)]
    other = [torch.equal(x, y) for x, y in zip(replayed[-2], replayed[-1], strict=True)]
    assert all(same) and not all(other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_draws_the_same_mask_again(reentrant):
    w = nn.Parameter(torch.ones(64, 64))

    def step():
        w.grad = None
        x = F.dropout(w * 1.0, 0.1)
        y = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=reentrant)
        z = F.dropout(y, 0.2)
        z.sum().backward()
        expected = (z.detach() != 0) / (0.9 * 0.5 * 0.8)
        return (w.grad - expected).abs().max()

    replayed = Replayed(step)
    assert float(replayed()) < 1e-5 and float(replayed()) < 1e-5 and replayed.captures == 1
    targets = [n.args[1] for n in replayed.recordings[0][1].step.graph.nodes if str(n.target) == "nova.uniform.default"]
    assert set(targets) == {0, 1, 2}


def test_statistics_of_draws():
    def step():
        return (
            torch.rand(20000),
            torch.randn(20000),
            F.dropout(torch.ones(20000), 0.25),
            torch.empty(20000).exponential_(2.0),
        )

    u, n, d, e = record(step, (), {}).result
    assert abs(u.mean() - 0.5) < 0.01 and u.min() >= 0 and u.max() < 1
    assert abs(n.mean()) < 0.03 and abs(n.std() - 1) < 0.03
    assert abs((d == 0).float().mean() - 0.25) < 0.02 and abs(e.mean() - 0.5) < 0.02


# ---- outputs ---------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    note: str = ""


def test_containers():
    def step(x):
        y = x * 2
        return {"a": [y, (y + 1, None)], "b": Pair(y.sum(), 3), "c": Result(y.mean(), "n")}, "text", True

    x = [(torch.randn(3),) for _ in range(3)]
    eager = [step(*b) for b in x]
    replayed = Replayed(step)
    for expected, b in zip(eager, x, strict=True):
        out = replayed(*b)
        assert type(out[0]["b"]) is Pair and type(out[0]["c"]) is Result and out[1:] == ("text", True)
        torch.testing.assert_close(out[0]["a"][1][0], expected[0]["a"][1][0])
        torch.testing.assert_close(out[0]["c"].loss, expected[0]["c"].loss)
    assert replayed.captures == 1


NAMED = {  # what PyTorch returns several tensors as
    "max": lambda x: x.max(1), "sort": lambda x: x.sort(0), "topk": lambda x: x.topk(2), "mode": lambda x: x.mode(),
    "kthvalue": lambda x: x.kthvalue(2), "qr": torch.linalg.qr, "slogdet": torch.linalg.slogdet, "aminmax": torch.aminmax,
    "size": lambda x: x.shape, "within": lambda x: {"best": [x.max(0), (x.min(1), x.size())]},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_results_with_names(name):
    step, replayed = NAMED[name], Replayed(NAMED[name])
    for _ in range(3):
        x = torch.randn(3, 3)
        found, expected = replayed(x), step(x)
        assert type(found) is type(expected)
        if name != "size":
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected
    assert replayed.captures == 1


def test_outputs_that_alias():
    def build():
        w = nn.Parameter(torch.randn(4))

        def step(x):
            y = x * w.detach()
            with torch.no_grad():
                w.add_(1)
            return y, y[:2], y, w.detach(), x.view(2, 2), w.detach()[1:]

        return step, [(torch.randn(4),) for _ in range(3)], lambda: [w]

    agree(build)


def test_objects_from_outside_are_returned_themselves():
    w = nn.Parameter(torch.randn(4))
    step = Replayed(lambda x: (w, x, w * x))
    for _ in range(2):
        x = torch.randn(4)
        a, b, _ = step(x)
        assert a is w and b is x
    assert step.captures == 1


# ---- whole operations ------------------------------------------------------------------------------------------


def attention_case(shapes, mask=None, mask_grad=False, **options):
    def build():
        ps = [nn.Parameter(torch.randn(*s)) for s in shapes]
        m = mask() if mask is not None else None
        if mask_grad:
            m = nn.Parameter(m)

        def step(s):
            for p in (*ps, m):
                if isinstance(p, nn.Parameter):
                    p.grad = None
            out = F.scaled_dot_product_attention(*ps, attn_mask=m, **options)
            (out * s).square().sum().backward()
            return out.detach()

        return (
            step,
            [(torch.rand(()),) for _ in range(2)],
            lambda: [p.grad for p in (*ps, m) if isinstance(p, nn.Parameter)],
        )

    return build


ATTENTION = {
    "plain": ([(2, 3, 5, 4)] * 3, None, {}),
    "causal": ([(2, 3, 5, 4)] * 3, None, {"is_causal": True}),
    "cross": ([(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)], None, {"scale": 0.3}),
    "causal cross": ([(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)], None, {"is_causal": True}),
    "grouped": ([(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)], None, {"enable_gqa": True}),
    "three": ([(3, 5, 4)] * 3, lambda: torch.randn(3, 5, 5), {}),
    "two": ([(5, 4)] * 3, None, {}),
    "five": ([(2, 2, 3, 5, 4)] * 3, None, {"is_causal": True}),
    "boolean": ([(2, 3, 5, 4)] * 3, lambda: torch.rand(2, 1, 1, 5) > 0.4, {}),
    "hidden rows": ([(2, 3, 5, 4)] * 3, lambda: torch.arange(5)[:, None] > torch.arange(5), {}),
    "additive": ([(2, 3, 5, 4)] * 3, lambda: torch.randn(3, 1, 5), {}),
    "double": ([(2, 3, 5, 4)] * 3, lambda: torch.randn(5, 5), {}),
    "broadcast": ([(2, 3, 5, 4), (1, 3, 5, 4), (1, 3, 5, 4)], None, {}),
    "one": ([(1, 1, 1, 4)] * 3, None, {"is_causal": True}),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(kind):
    shapes, mask, options = ATTENTION[kind]
    step = agree(attention_case(shapes, mask, **options), rtol=1e-4, atol=1e-5)
    assert "nova.attention_backward.default" in {str(n.target) for n in step.recordings[0][1].step.graph.nodes}


def test_attention_gradient_of_its_mask():
    agree(attention_case([(2, 3, 5, 4)] * 3, lambda: torch.randn(3, 1, 5), mask_grad=True), atol=1e-5)


def test_attention_errors_are_pytorchs():
    with pytest.raises(RuntimeError):
        record(lambda q, k: F.scaled_dot_product_attention(q, k, k), (torch.randn(2, 3, 4), torch.randn(2, 3, 5)), {})


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "form", ["plain", "weights", "smooth", "weights smooth", "ignored", "pixels", "single", "soft"]
)
def test_cross_entropy(form, reduction):
    options = {"reduction": reduction}
    if "weights" in form:
        options["weight"] = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0])
    if "smooth" in form:
        options["label_smoothing"] = 0.2
    if "ignored" in form or "smooth" in form:
        options["ignore_index"] = 2

    def build():
        z = nn.Parameter(torch.randn(*{"pixels": (3, 5, 2, 4), "single": (5,)}.get(form, (7, 5))))
        t = {"pixels": torch.randint(5, (3, 2, 4)), "single": torch.tensor(3), "soft": torch.rand(7, 5)}.get(
            form, torch.randint(5, (7,))
        )

        def step(x):
            z.grad = None
            loss = F.cross_entropy(z * x, t, **options)
            (loss * (torch.arange(loss.numel()).view(loss.shape) + 1.0)).sum().backward()
            return loss.detach()

        return step, [(torch.rand(()) + 1,) for _ in range(2)], lambda: [z.grad]

    agree(build)


def test_label_out_of_range_is_eagers_error():
    with pytest.raises(IndexError, match="out of bounds"):
        record(F.cross_entropy, (torch.randn(3, 4), torch.tensor([0, 1, 4])), {})


def test_double_precision():
    def build():
        m = nn.Linear(4, 3).double()

        def step(x, t):
            m.zero_grad()
            q = x.view(1, 1, 5, 4)
            out = F.scaled_dot_product_attention(q, q, q).view(5, 4)
            loss = F.cross_entropy(m(out), t)
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            return loss.detach()

        return (
            step,
            [(torch.randn(5, 4).double(), torch.randint(3, (5,))) for _ in range(2)],
            lambda: [p.grad for p in m.parameters()],
        )

    agree(build, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_whose_weights_were_replaced(kind):
    """It makes lists of its weights anew on its next call, inside the step."""
    layer, x = kind(3, 2), torch.ones(2, 1, 3)

    @nova.jit
    def step(x):
        layer.zero_grad()
        layer(x)[0].sum().backward()
        return layer.weight_ih_l0.grad * 1

    for _ in range(2):
        layer.load_state_dict({k: v.clone() * 0.5 for k, v in layer.state_dict().items()}, assign=True)
        found = [step(x), step(x)]
        layer.zero_grad()
        layer(x)[0].sum().backward()
        for gradient in found:
            torch.testing.assert_close(gradient, layer.weight_ih_l0.grad)


@pytest.mark.parametrize("how", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}])
def test_float64_cross_entropy_keeps_its_precision(how):
    x, target = (torch.randn(5, 7, dtype=torch.float64) * 5).requires_grad_(), torch.tensor([0, 6, 2, 3, 3])

    def gradient(x, target):
        return torch.autograd.grad(torch.nn.functional.cross_entropy(x, target, **how), x)[0]

    step = nova.jit(gradient)
    for _ in range(3):
        torch.testing.assert_close(step(x, target), gradient(x, target), rtol=1e-13, atol=1e-15)
