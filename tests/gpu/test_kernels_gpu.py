"""Every kernel family on a GPU against float64 (the cases of gpu_case_list.py), and what takes more than one case to
show: dropout, errors that are raised later, tensors beyond 2^31 elements."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nova
from tests import gpu_case_list, gpu_cases

CASES = [
    pytest.param(case, id=name, marks=[pytest.mark.quick] if case.quick else [])
    for name, case in gpu_case_list.cases().items()
]


@pytest.mark.parametrize("case", CASES)
def test_kernel(case):
    gpu_cases.check(case, "cuda")


# ---- random numbers


@pytest.mark.quick
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(1,), (37,), (64, 65), (3, 5, 1001)])
def test_dropout_draws_the_same_words_on_every_device(shape, p):
    masks = {}
    for device in ("cpu", "cuda"):
        step = nova.jit(lambda x: F.dropout(x, p, True))
        x = torch.ones(shape, device=device)
        torch.manual_seed(5)
        step(x)
        masks[device] = [step(x).cpu() for _ in range(3)]
        torch.manual_seed(5)
        step(x)
        again = [step(x).cpu() for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(masks[device], again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(masks["cpu"], masks["cuda"], strict=True))
    if p == 0.25 and len(shape) == 3:
        first, second, _ = masks["cuda"]
        assert abs((first == 0).float().mean().item() - p) < 0.02 and not torch.equal(first, second)


def test_random_tensors_are_those_of_the_cpu():
    """Uniform numbers bit by bit; normal ones to rounding."""
    drawn = {}
    for device in ("cpu", "cuda"):
        step = nova.jit(lambda x: (torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x.sigmoid())))
        x = torch.linspace(-2, 2, 4099, device=device).view(-1, 4099)
        torch.manual_seed(9)
        step(x)
        drawn[device] = [t.cpu() for t in step(x)]
    assert torch.equal(drawn["cpu"][0], drawn["cuda"][0])
    torch.testing.assert_close(drawn["cuda"][1], drawn["cpu"][1], rtol=1e-5, atol=1e-6)
    assert (drawn["cpu"][2] != drawn["cuda"][2]).sum() <= 2  # where a sigmoid rounds the other way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_backward_uses_the_mask_of_the_forward(dtype):
    w = nn.Parameter(torch.ones(33, 130, device="cuda", dtype=dtype))

    @nova.jit
    def step():
        w.grad = None
        y = F.dropout(w * 1.0, 0.5, True)
        y.sum().backward()
        return (w.grad - 2.0 * (y.detach() != 0)).abs().max(), y.detach()

    seen = [step() for _ in range(3)]
    assert all(worst == 0 for worst, _ in seen)
    assert not torch.equal(seen[1][1], seen[2][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length, width", [(17, 24), (130, 64)])
def test_attention_dropout(length, width, dtype):
    """Values that are the identity show the mask: a forward and a backward that use one, drawn afresh on every call."""
    keys = min(length, width)
    q = torch.zeros(2, 3, length, width, device="cuda", dtype=dtype, requires_grad=True)
    k = torch.zeros(2, 3, keys, width, device="cuda", dtype=dtype)
    v = torch.eye(keys, width, device="cuda", dtype=dtype).expand(2, 3, keys, width).contiguous().requires_grad_()

    @nova.jit
    def step(dy):
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        (dv,) = torch.autograd.grad(y, v, dy)
        return y.detach(), dv

    dy = torch.randn(2, 3, length, width, device="cuda").to(dtype)
    step(dy)
    y, dv = step(dy)
    other, _ = step(dy)
    kept = y[..., :keys] != 0
    assert 0.6 < kept.float().mean() < 0.8 and not torch.equal(kept, other[..., :keys] != 0)
    torch.testing.assert_close(y[..., :keys], (kept / (0.7 * keys)).to(dtype), rtol=1e-2, atol=1e-6)
    want = (kept.double() / (0.7 * keys)).transpose(-1, -2) @ dy.double()
    assert gpu_cases.distance(dv, want) < (1e-6 if dtype == torch.float32 else 6e-3)


# ---- errors


@pytest.mark.quick
@pytest.mark.parametrize("bad", [-1, 50, 10**12])
@pytest.mark.parametrize("how", ["embedding", "gather", "cross_entropy", "index_add", "embedding_backward"])
def test_indices_out_of_range_are_raised_later(how, bad):
    table = torch.randn(50, 24, device="cuda", requires_grad=True)

    def embedding_backward(i):
        return torch.autograd.grad(F.embedding(i, table).square().sum(), table)[0]

    step = nova.jit({
        "embedding": lambda i: F.embedding(i, table).sum(1),
        "gather": lambda i: table.detach().gather(0, i[:, None].expand(-1, 24)),
        "cross_entropy": lambda i: F.cross_entropy(table.detach().t()[:1].expand(33, 50) * 1.0, i),
        "index_add": lambda i: torch.zeros(50, 24, device="cuda").index_add(0, i, table.detach()[:33]),
        "embedding_backward": embedding_backward,
    }[how])  # fmt: skip
    ids = torch.randint(0, 50, (33,), device="cuda")
    step(ids)
    good = step(ids)
    wrong = ids.clone()
    wrong[17] = bad
    step(wrong)
    with pytest.raises((IndexError, RuntimeError), match=str(bad)):  # whichever eager raises on a CPU
        nova.synchronize()
    assert torch.equal(step(ids), good)
    nova.synchronize()
    step(wrong)
    torch.cuda.synchronize()
    with pytest.raises((IndexError, RuntimeError), match=str(bad)):
        step(ids)
    nova.synchronize()


# ---- large


def large(count: int) -> torch.Tensor:
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    return (torch.arange(count, device="cuda", dtype=torch.int32) % 253).to(torch.bfloat16)


def test_more_than_two_to_the_31_elements():
    count = 2**31 + 4099
    x = large(count)
    step = nova.jit(lambda x: x * 2 + 1)
    step(x)
    x[-5:] = 77
    y = step(x)
    for at in (0, 2**30, 2**31 - 2048, 2**31, count - 4096):
        part = slice(at, at + 4096)
        assert torch.equal(y[part], x[part] * 2 + 1), at
    del x, y
    torch.cuda.empty_cache()


def test_rows_beyond_two_to_the_31_elements():
    """Row reductions and a broadcast over a matrix of 2^31 and more elements."""
    x = large(65537 * 32776).view(65537, 32776)
    bias = torch.randn(32776, device="cuda", dtype=torch.bfloat16)
    step = nova.jit(lambda x, b: ((x + b).amax(1), x.sum(1, dtype=torch.float32)))
    step(x[:2], bias)
    high, total = step(x, bias)
    for rows in (slice(0, 8), slice(65520, 65537)):
        assert torch.equal(high[rows], (x[rows] + bias).amax(1))
        torch.testing.assert_close(total[rows], x[rows].double().sum(1).float(), rtol=1e-5, atol=1.0)
    del x
    torch.cuda.empty_cache()
