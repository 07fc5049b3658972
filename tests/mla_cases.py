"""Inputs and oracles for the kernel tests, independent of hf_mla's own reference.

Shapes: B rows, Sq query tokens, H heads, R = kv_lora_rank, P = qk_rope_head_dim, N blocks of S tokens.
Every slot that a row does not use holds NaN, every table column beyond a row holds a wild id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_mla import kernels

WILD = 2147480000


@dataclass
class Inputs:
    q_latent: torch.Tensor
    q_pe: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    sm_scale: float

    def plan(self, backend: str, **changes) -> kernels.DecodePlan:
        arguments = {
            "kv_lens_host": self.kv_lens.cpu(),
            "num_heads": self.q_latent.shape[2],
            "kv_lora_rank": self.q_latent.shape[3],
            "qk_rope_head_dim": self.q_pe.shape[3],
            "block_size": self.pages.shape[1],
            "dtype": self.pages.dtype,
            "backend": backend,
        }
        return kernels.plan(self.block_table, self.kv_lens, **{**arguments, **changes})

    def decode(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.decode(self.plan(backend), self.q_latent, self.q_pe, self.pages, self.sm_scale)


def make(
    lens, *, q_len=1, heads=4, rank=128, rope=64, block=16, dtype=torch.float32, device="cpu", scale=1.0, spare=3,
    entry=None, table_dtype=torch.int32, seed=0,
) -> Inputs:  # fmt: skip
    """Random inputs: row b stores lens[b] tokens, queried by its last; `scale` multiplies queries and keys."""
    cpu = torch.Generator().manual_seed(seed)
    batch, columns = len(lens), max(1, max(-(-n // block) for n in lens)) + 1
    blocks = batch * columns + spare
    entry = entry or rank + rope
    table = torch.randperm(blocks, generator=cpu)[: batch * columns].view(batch, columns)
    stored = torch.tensor(lens)
    used = torch.zeros(blocks, block, dtype=torch.bool)
    for b, n in enumerate(lens):
        t = torch.arange(n)
        used[table[b, t // block], t % block] = True
        table[b, -(-n // block) :] = WILD
    gen = torch.Generator(device).manual_seed(seed)
    pages = (torch.randn(blocks, block, entry, generator=gen, device=device) * scale).to(dtype)
    pages[~used.to(device)] = float("nan")
    pages[..., rank + rope :] = float("nan")
    kv_lens = (stored[:, None] - torch.arange(q_len - 1, -1, -1)).clamp(min=0).int()
    q = torch.randn(batch, q_len, heads, rank + rope, generator=gen, device=device) * scale
    q = q.to(dtype)
    return Inputs(
        q[..., :rank], q[..., rank:], pages, table.to(device, table_dtype), kv_lens.to(device), (rank + rope) ** -0.5
    )


def dense(
    x: Inputs, work: torch.dtype, rounded: bool = False, shuffle: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention one query at a time over copied-out rows, in `work` precision; `rounded` rounds what a kernel holds
    in the inputs' dtype (the weights and the output) and nothing else. `shuffle` seeds another order in which a
    score's products are summed: exactly the same mathematics, another rounding."""
    batch, q_len, heads, rank = x.q_latent.shape
    width, block, dtype = rank + x.q_pe.shape[3], x.pages.shape[1], x.pages.dtype
    out = torch.zeros(batch, q_len, heads, rank, dtype=work, device=x.pages.device)
    lse = torch.full((batch, q_len, heads), float("-inf"), dtype=work, device=x.pages.device)
    order = torch.arange(width)
    if shuffle is not None:
        order = torch.randperm(width, generator=torch.Generator().manual_seed(shuffle))
    for b in range(batch):
        for s in range(q_len):
            n = int(x.kv_lens[b, s])
            if n == 0:
                continue
            ids = x.block_table[b, : -(-n // block)].tolist()
            keys = torch.cat([x.pages[i, :, :width] for i in ids])[:n].to(work)
            query = torch.cat([x.q_latent[b, s], x.q_pe[b, s]], -1).to(work)
            scores = query[:, order] @ keys[:, order].T * x.sm_scale
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            weights = weights.to(dtype).to(work) if rounded else weights
            out[b, s] = weights @ keys[:, :rank] / total
            lse[b, s] = (top + total.log()).squeeze(-1)
    return (out.to(dtype).to(work) if rounded else out), lse


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def check(x: Inputs, out: torch.Tensor, lse: torch.Tensor, factor: float = 2.0, orders: int = 1) -> None:
    """out's error against float64 is within `factor` of the error of the straightforward computation in its dtype
    (float32 sums, weights and output rounded to it); lse is float32-accurate; rows of length 0 are 0 and -inf.

    `orders`: summation orders of which the largest error counts. Large scores make the error that of a few queries
    with two almost equal keys, and one order may happen to round those well."""
    exact, exact_lse = dense(x, torch.float64)
    plains = [dense(x, torch.float32, rounded=True, shuffle=seed) for seed in (None, *range(orders - 1))]
    assert out.dtype == x.pages.dtype and out.is_contiguous() and out.shape == x.q_latent.shape
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:-1]
    assert torch.isfinite(out).all()
    empty = x.kv_lens == 0
    assert (out[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    if bool(empty.all()):
        return
    budget = factor * max(rms(plain - exact) for plain, _ in plains) + 2**-22 * rms(exact)
    error = rms(out - exact)
    assert error <= budget, f"error {error:.3g}, budget {budget:.3g}"
    full = ~empty
    error = float((lse - exact_lse)[full].abs().max())
    plain_error = max(float((plain_lse - exact_lse)[full].abs().max()) for _, plain_lse in plains)
    budget = 4 * plain_error + 1e-5 * (1 + float(exact_lse[full].abs().max()))
    assert error <= budget, f"lse error {error:.3g}, budget {budget:.3g}"
