"""The seven models of the test suite, small and ragged, each as a factory of (step, batches, state).

`build(name, **overrides)` seeds nothing: call `torch.manual_seed` first. `state()` lists every tensor that a
training step changes: parameters, buffers, optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Case:
    """One training step with its data; `state` returns named tensors."""

    step: Callable
    batches: list[tuple]
    state: Callable[[], dict[str, Tensor]]
    models: list[nn.Module]


def named_state(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for i, model in enumerate(models):
        out |= {f"{i}.{k}": v for k, v in [*model.named_parameters(), *model.named_buffers()]}
    for j, optimizer in enumerate(optimizers):
        params = [p for g in optimizer.param_groups for p in g["params"]]
        for i, p in enumerate(params):
            out |= {f"opt{j}.{i}.{k}": v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
    return out


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 structure: learned positions, pre-norm blocks, head tied to the token embedding."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, context: int):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.n1, self.n2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, heads * self.dim, bias=False)
        self.k = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        hidden = int(width * 8 / 3)
        self.gate, self.up, self.down = (nn.Linear(width, hidden, False), nn.Linear(width, hidden, False),
                                         nn.Linear(hidden, width, False))  # fmt: skip

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        h = self.n1(x)
        q = self.q(h).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k(h).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v(h).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """RMSNorm, rotary embedding, grouped-query attention, SwiGLU, untied head."""

    def __init__(self, vocab: int, width: int, heads: int, kv_heads: int, layers: int, context: int):
        super().__init__()
        self.tok, self.norm = nn.Embedding(vocab, width), RMSNorm(width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        dim = width // heads
        angle = torch.outer(torch.arange(context).float(), 10000.0 ** (-torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, t = self.tok(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = self.ln1(x + self.o(y.transpose(1, 2).reshape(b, t, c)))
        return self.ln2(x + self.out(F.gelu(self.fc(x))))


class Encoder(nn.Module):
    """BERT-like: post-norm blocks over padded sequences, masked-token loss that ignores the padding."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, context: int):
        super().__init__()
        self.tok, self.pos, self.ln = nn.Embedding(vocab, width), nn.Embedding(context, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, keep: Tensor, targets: Tensor) -> Tensor:
        x = self.ln(self.tok(ids) + self.pos.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, keep)
        return F.cross_entropy(self.head(x).transpose(1, 2), targets, ignore_index=-100)


class ConvNet(nn.Module):
    def __init__(self, channels: int = 6, classes: int = 7):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.c2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.b2 = nn.BatchNorm2d(2 * channels)
        self.fc = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.b1(self.c1(x))), 2)
        x = F.relu(self.b2(self.c2(x))).mean((2, 3))
        return F.cross_entropy(self.fc(x), y)


class Recurrent(nn.Module):
    def __init__(self, vocab: int, width: int):
        super().__init__()
        self.tok, self.rnn, self.head = nn.Embedding(vocab, width), nn.LSTM(width, width, 2), nn.Linear(width, vocab)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        h, _ = self.rnn(self.tok(ids.t()))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.t().flatten())


def _training_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float = 1.0) -> Callable:
    def step(*batch):
        loss = model(*batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _case(model: nn.Module, batches: list[tuple], lr: float = 1e-3) -> Case:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return Case(_training_step(model, optimizer), batches, lambda: named_state([model], [optimizer]), [model])


def _tokens(vocab: int, batch: int, length: int, steps: int) -> list[tuple]:
    def one() -> tuple:
        x = torch.randint(vocab, (batch, length + 1))
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    return [one() for _ in range(steps)]


def mlp(steps: int = 20, batch: int = 32, width: int = 64, depth: int = 4, **_) -> Case:
    sizes = [width] * depth
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batches = [(torch.randn(batch, width), torch.randn(batch, width)) for _ in range(steps)]
    return Case(step, batches, lambda: named_state([model], [optimizer]), [model])


def gpt2(steps=20, batch=3, length=17, vocab=257, width=48, heads=2, layers=2, lr=1e-3, **_) -> Case:
    return _case(GPT(vocab, width, heads, layers, length + 3), _tokens(vocab, batch, length, steps), lr)


def llama(steps=20, batch=3, length=17, vocab=257, width=96, heads=4, kv_heads=2, layers=2, **_) -> Case:
    return _case(Llama(vocab, width, heads, kv_heads, layers, length + 3), _tokens(vocab, batch, length, steps))


def bert(steps=20, batch=3, length=17, vocab=257, width=48, heads=2, layers=2, **_) -> Case:
    def one() -> tuple:
        ids, lengths = torch.randint(vocab, (batch, length)), torch.randint(1, length + 1, (batch,))
        keep = torch.arange(length) < lengths[:, None]
        targets = torch.where(keep & (torch.rand(batch, length) < 0.5), ids, -100)
        targets[:, 0] = ids[:, 0]
        return ids, keep, targets

    return _case(Encoder(vocab, width, heads, layers, length + 3), [one() for _ in range(steps)])


def convnet(steps=20, batch=3, size=14, **_) -> Case:
    return _case(ConvNet(), [(torch.randn(batch, 3, size, size), torch.randint(7, (batch,))) for _ in range(steps)])


def lstm(steps=20, batch=3, length=9, vocab=57, width=24, **_) -> Case:
    return _case(Recurrent(vocab, width), _tokens(vocab, batch, length, steps))


def gan(steps=20, batch=5, noise=4, width=17, **_) -> Case:
    G = nn.Sequential(nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, 6))
    D = nn.Sequential(nn.Linear(6, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
    og, od = torch.optim.Adam(G.parameters(), 1e-2, betas=(0.5, 0.9)), torch.optim.RMSprop(D.parameters(), 1e-3)

    def step(z, real):
        fake = G(z)
        od.zero_grad()
        d = F.softplus(D(fake.detach())).mean() + F.softplus(-D(real)).mean()
        d.backward()
        od.step()
        og.zero_grad()
        g = F.binary_cross_entropy_with_logits(D(fake), torch.ones(len(z), 1, device=z.device))
        g.backward()
        og.step()
        return {"d": d.detach(), "g": g.detach()}

    batches = [(torch.randn(batch, noise), torch.randn(batch, 6) * math.pi) for _ in range(steps)]
    return Case(step, batches, lambda: named_state([G, D], [og, od]), [G, D])


MODELS: dict[str, Callable[..., Case]] = {
    "mlp": mlp, "gpt2": gpt2, "llama": llama, "bert": bert, "convnet": convnet, "lstm": lstm, "gan": gan,
}  # fmt: skip


def build(name: str, **overrides) -> Case:
    return MODELS[name](**overrides)
