"""What stands in for operators that PyTorch has on a GPU only, against autograd of their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nova.capture import cuda_rules as rules

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def close(a, b, dtype):
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert a.dtype == dtype
    torch.testing.assert_close(a, b.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(7,), (3, 7)])
def test_rms_norm(dtype, weighted, shape):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 7).to(dtype).requires_grad_()
    w = torch.randn(shape).to(dtype).requires_grad_() if weighted else None
    dy = torch.randn(5, 3, 7).to(dtype)
    y, rstd = rules.rms_norm(None, x.detach(), list(shape), w if w is None else w.detach(), 1e-5)
    wide = x.double()
    want = F.rms_norm(wide, shape, None if w is None else w.double(), 1e-5)
    close(y, want, dtype)
    want.backward(dy.double())
    dx, dw = rules.rms_norm_backward(
        None, dy, x.detach(), list(shape), rstd, w if w is None else w.detach(), [True, weighted]
    )
    close(dx, x.grad, dtype)
    if weighted:
        close(dw, w.grad, dtype)
    assert rules.rms_norm_backward(None, dy, x.detach(), list(shape), rstd, None, [False, False]) == (None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("used", ["hy", "cy", "both"])
def test_lstm_cell(dtype, biased, used):
    torch.manual_seed(0)
    gi, gh = (torch.randn(4, 20).to(dtype).requires_grad_() for _ in range(2))
    cx = torch.randn(4, 5).to(dtype).requires_grad_()
    bias = torch.randn(20).to(dtype).requires_grad_() if biased else None
    i, f, g, o = (gi.double() + gh.double() + (bias.double() if biased else 0)).chunk(4, 1)
    cy_want = f.sigmoid() * cx.double() + i.sigmoid() * g.tanh()
    hy_want = o.sigmoid() * cy_want.tanh()
    given = [None if t is None else t.detach() for t in (gi, gh, cx, bias)]
    hy, cy, saved = rules.lstm_cell(None, *given, None if bias is None else torch.zeros_like(given[3]))
    close(hy, hy_want, dtype)
    close(cy, cy_want, dtype)
    dh = torch.randn(4, 5).to(dtype) if used != "cy" else None
    dc = torch.randn(4, 5).to(dtype) if used != "hy" else None
    loss = sum((w * d.double()).sum() for w, d in ((hy_want, dh), (cy_want, dc)) if d is not None)
    loss.backward()
    grad, dcx, dbias = rules.lstm_cell_backward(None, dh, dc, given[2], cy, saved, biased)
    close(grad, gi.grad, dtype)
    close(dcx, cx.grad, dtype)
    assert (dbias is not None) == biased
    if biased:
        torch.testing.assert_close(dbias, bias.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
def test_gru_cell(dtype, biased):
    torch.manual_seed(0)
    gi, gh = (torch.randn(4, 15).to(dtype).requires_grad_() for _ in range(2))
    hx = torch.randn(4, 5).to(dtype).requires_grad_()
    bi, bh = (torch.randn(15).to(dtype).requires_grad_() if biased else None for _ in range(2))
    wide = [gi.double() + (bi.double() if biased else 0), gh.double() + (bh.double() if biased else 0)]
    (ir, iz, inew), (hr, hz, hnew) = (w.chunk(3, 1) for w in wide)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    want = n + z * (hx.double() - n)
    given = [None if t is None else t.detach() for t in (gi, gh, hx, bi, bh)]
    hy, saved = rules.gru_cell(None, *given)
    close(hy, want, dtype)
    dh = torch.randn(4, 5).to(dtype)
    want.backward(dh.double())
    dgi, dgh, dhx, dbi, dbh = rules.gru_cell_backward(None, dh, saved, biased)
    close(dgi, gi.grad, dtype)
    close(dgh, gh.grad, dtype)
    close(dhx, hx.grad, dtype)
    assert (dbi is not None) == (dbh is not None) == biased
    if biased:
        for got, wanted in ((dbi, bi.grad), (dbh, bh.grad)):
            torch.testing.assert_close(got, wanted, rtol=5e-2, atol=5e-2)
