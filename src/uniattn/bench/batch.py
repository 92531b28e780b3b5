"""The tensors of one workload on the device: one copy, shared by all providers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uniattn.bench.workloads import Workload
from uniattn.testing import Batch

# vLLM's kernel loads whole tiles of page ids and reads past a row's last page, so rows end in spare columns of page 0.
_SPARE_COLUMNS = 8


@dataclass(frozen=True)
class DeviceBatch:
    """A workload's tensors.

    Attributes:
        q: `[num_tokens, num_q_heads, head_dim]`.
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, head_dim]`, pages shuffled, all values finite: peers read past a
            sequence's end and multiply by 0.
        cu_seqlens_q: `[num_seqs + 1]` int32.  seqlens_k: `[num_seqs]` int32.  page_table: `[num_seqs, columns]` int32.
    """

    workload: Workload
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    page_table: Tensor

    @property
    def num_seqs(self) -> int:
        return len(self.workload.lengths)

    @property
    def softmax_scale(self) -> float:
        return self.workload.head_dim**-0.5

    def poisoned_out(self) -> Tensor:
        """A buffer for the output, full of NaN, so that what a provider leaves unwritten shows."""
        return torch.full_like(self.q, torch.nan)

    def single_queries(self, tokens: list[int]) -> Batch:
        """The query tokens `tokens` as a batch of their own, one sequence each, over the same caches.

        A causal query token sees what it would see as the last token of a sequence that ends there.
        """
        starts = self.cu_seqlens_q.tolist()
        lengths, seqs = [], []
        for token in tokens:
            seq = next(s for s in range(self.num_seqs) if starts[s] <= token < starts[s + 1])
            q_len, kv_len = self.workload.lengths[seq]
            lengths.append((1, kv_len - q_len + token - starts[seq] + 1))
            seqs.append(seq)
        device = self.q.device
        options = {"window": self.workload.window, "softcap": self.workload.softcap}
        return Batch(
            lengths=tuple(lengths),
            q=self.q[tokens],
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            cu_seqlens_q=torch.arange(len(tokens) + 1, dtype=torch.int32, device=device),
            seqlens_k=torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32, device=device),
            page_table=self.page_table[seqs],
            options={"causal": True, **options},
        )


def build(w: Workload, device: torch.device | str, seed: int = 0) -> DeviceBatch:
    """Normally distributed Q, K and V, drawn on the device: the largest caches would take a minute on the host."""
    gen = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, w.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=dtype, device=device)

    pages = [-(-kv_len // w.page_size) for _, kv_len in w.lengths]
    num_pages = sum(pages) + 1
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros((len(pages), max(pages) + _SPARE_COLUMNS - max(pages) % _SPARE_COLUMNS), dtype=torch.int32)
    first = 0
    for row, count in zip(table, pages, strict=True):
        row[:count] = shuffled[first : first + count]
        first += count
    q_lens = torch.tensor([0, *(q_len for q_len, _ in w.lengths)])
    return DeviceBatch(
        workload=w,
        q=normal(w.num_tokens, w.num_q_heads, w.head_dim),
        k_cache=normal(num_pages, w.page_size, w.num_kv_heads, w.head_dim),
        v_cache=normal(num_pages, w.page_size, w.num_kv_heads, w.head_dim),
        cu_seqlens_q=q_lens.cumsum(0).int().to(device),
        seqlens_k=torch.tensor([kv_len for _, kv_len in w.lengths], dtype=torch.int32, device=device),
        page_table=table.to(device),
    )
