"""Build a batch for `uniattn.attention` from a list of `(q_len, kv_len)`, with the features and the memory layout asked for.

Everything that `uniattn` must not read is NaN from the start: gaps between rows of a strided cache, unused pages, the tails of
pages. Page ids are shuffled and page-table entries past a sequence's last page hold garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Lengths = Sequence[tuple[int, int]]

#: How the paged caches lie in memory. Each makes two views `[num_pages, page_size, num_kv_heads, dim]` with unit last stride.
LAYOUTS = ("split", "hnd", "packed", "packed_hnd", "interleaved", "flat", "gapped", "mixed", "mla")


@dataclass(frozen=True)
class Batch:
    """The tensors and options of one call of `uniattn.attention`."""

    lengths: tuple[tuple[int, int], ...]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def kwargs(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments for `uniattn.attention` and for `uniattn.reference.attention`; `changes` are laid on top."""
        names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table", "cu_seqlens_k")
        return {**{name: getattr(self, name) for name in names}, **self.options, **changes}

    def replace(self, **changes: Any) -> Batch:
        """The same batch with some fields changed."""
        return replace(self, **changes)

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def num_tokens(self) -> int:
        """Query rows, those past `cu_seqlens_q[-1]` included."""
        return self.q.shape[0]

    def where(self, token: int) -> str:
        """Names query row `token` for a message: its sequence and its place in it."""
        starts = self.cu_seqlens_q.tolist()
        for seq, (begin, end) in enumerate(pairwise(starts)):
            if begin <= token < end:
                q_len, kv_len = self.lengths[seq]
                return f"sequence {seq} (q_len {q_len}, kv_len {kv_len}), its query token {token - begin}"
        return f"padding row {token} (past cu_seqlens_q[-1] = {starts[-1]})"


def make_batch(
    lengths: Lengths,
    *,
    num_q_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    page_size: int | None = 16,
    layout: str = "split",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    sinks: bool = False,
    alibi: bool = False,
    causal: bool | Sequence[bool] = True,
    lengths_as: str = "seqlens_k",
    num_padding_rows: int = 0,
    num_spare_pages: int = 3,
    num_spare_columns: int = 2,
    table_filler: int = -1,
    magnitude: float = 1.0,
    **options: Any,
) -> Batch:
    """A batch of normally distributed Q, K, V.

    Args:
        lengths: `(q_len, kv_len)` a sequence, in tokens; any may be 0, and `q_len` may exceed `kv_len`.
        page_size: KV tokens a page; None makes contiguous K/V `[num_kv_tokens, num_kv_heads, dim]` with `cu_seqlens_k`.
        layout: one of `LAYOUTS`; where K/V are contiguous, "split", "packed" or "gapped".
        sinks, alibi: add these per-head tensors to the options.
        causal: a bool, or one a sequence (becomes a bool tensor).
        lengths_as: "seqlens_k", "cu_seqlens_k" or, where K/V are contiguous, "both": then `cu_seqlens_k` leaves each sequence
            two rows more than `seqlens_k` counts.
        num_padding_rows: query rows past `cu_seqlens_q[-1]`, as graph padding leaves them; filled with NaN.
        num_spare_pages: pages that no sequence uses.
        num_spare_columns: page-table columns past the longest sequence.
        table_filler: the value of page-table entries past a sequence's last page.
        magnitude: standard deviation of Q; large values make peaked softmax.
        options: `softmax_scale`, `window`, `softcap` and other arguments of `uniattn.attention`, passed on by `kwargs()`.
    """
    gen = torch.Generator().manual_seed(seed)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    num_rows = sum(q_lens) + num_padding_rows
    q = _normal((num_rows, num_q_heads, head_dim), gen, dtype, device) * magnitude
    q[sum(q_lens) :] = torch.nan
    # Drawn before anything that depends on page size or layout, so that a seed gives the same numbers in all of them.
    keys = [_normal((n, num_kv_heads, head_dim), gen, dtype, device) for n in kv_lens]
    values = [_normal((n, num_kv_heads, v_head_dim), gen, dtype, device) for n in kv_lens]
    if page_size is None:
        room = [n + 2 if lengths_as == "both" else n for n in kv_lens]
        shape, row_starts = (sum(room), 1), _starts(room)
        table = None
    else:
        table = _page_table(kv_lens, page_size, num_spare_pages, num_spare_columns, table_filler, gen)
        shape, row_starts = (sum(-(-n // page_size) for n in kv_lens) + num_spare_pages, page_size), _starts(kv_lens)
    k_cache, v_cache = allocate(layout, *shape, num_kv_heads, head_dim, v_head_dim, dtype=dtype, device=device)
    if page_size is None:
        k_cache, v_cache = k_cache[:, 0], v_cache[:, 0]
    for seq, kv_len in enumerate(kv_lens):
        slots = torch.arange(kv_len)
        if table is None:
            index: tuple[Tensor, ...] = ((row_starts[seq] + slots).to(device),)
        else:
            assert page_size is not None
            index = (table[seq, slots // page_size].long().to(device), (slots % page_size).to(device))
        k_cache[index] = keys[seq]
        if layout != "mla":
            v_cache[index] = values[seq]

    if sinks:
        options["sinks"] = _normal((num_q_heads,), torch.Generator().manual_seed(seed + 1), torch.float32, device)
    if alibi:
        options["alibi_slopes"] = (2.0 ** -torch.arange(1, num_q_heads + 1).float().remainder(8)).to(device)
    options["causal"] = causal if isinstance(causal, bool) else torch.tensor(list(causal), dtype=torch.bool, device=device)
    give_seqlens, give_starts = lengths_as in ("seqlens_k", "both"), lengths_as in ("cu_seqlens_k", "both")
    return Batch(
        lengths=tuple((q_len, kv_len) for q_len, kv_len in lengths),
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=_starts(q_lens).to(device),
        seqlens_k=torch.tensor(kv_lens, dtype=torch.int32, device=device) if give_seqlens else None,
        page_table=None if table is None else table.to(device),
        cu_seqlens_k=row_starts.to(device) if give_starts else None,
        options=options,
    )


def allocate(
    layout: str,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Two cache views `[num_pages, page_size, num_kv_heads, dim]` over storage laid out as `layout` names it, all NaN.

    - `split`: K and V apart, tokens before heads (NHD).  `hnd`: the same with heads before tokens.
    - `packed`: `[pages, slots, heads, K then V]`.  `packed_hnd`: `[pages, heads, slots, K then V]`.
    - `interleaved`: `[pages, K or V, slots, heads, dim]`, so that a page is twice as far from the next as its size.
    - `flat`: `[slots, heads, dim]` seen as pages.
    - `gapped`: each row is followed by 3 unused elements and starts 1 element in: nothing is aligned.
    - `mixed`: K as in `split`, V as in `hnd`, so that no stride of one is a stride of the other.
    - `mla`: V is a view of K's first dims.
    """
    if layout == "interleaved" and head_dim != v_head_dim:
        raise ValueError("interleaved needs head_dim == v_head_dim")

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    if layout == "split":
        return nan(num_pages, page_size, num_kv_heads, head_dim), nan(num_pages, page_size, num_kv_heads, v_head_dim)
    if layout == "hnd":
        k, v = (nan(num_pages, num_kv_heads, page_size, dim).transpose(1, 2) for dim in (head_dim, v_head_dim))
        return k, v
    if layout in ("packed", "packed_hnd"):
        if layout == "packed":
            packed = nan(num_pages, page_size, num_kv_heads, head_dim + v_head_dim)
        else:
            packed = nan(num_pages, num_kv_heads, page_size, head_dim + v_head_dim).transpose(1, 2)
        return packed[..., :head_dim], packed[..., head_dim:]
    if layout == "interleaved":
        both = nan(num_pages, 2, page_size, num_kv_heads, head_dim)
        return both[:, 0], both[:, 1]
    if layout == "flat":
        k, v = (nan(num_pages * page_size, num_kv_heads, dim) for dim in (head_dim, v_head_dim))
        return k.view(-1, page_size, num_kv_heads, head_dim), v.view(-1, page_size, num_kv_heads, v_head_dim)
    if layout == "gapped":
        k, v = (nan(num_pages, page_size, num_kv_heads, dim + 4)[..., 1 : dim + 1] for dim in (head_dim, v_head_dim))
        return k, v
    if layout == "mixed":
        v = nan(num_pages, num_kv_heads, page_size, v_head_dim).transpose(1, 2)
        return nan(num_pages, page_size, num_kv_heads, head_dim), v
    if layout == "mla":
        k = nan(num_pages, page_size, num_kv_heads, head_dim)
        return k, k[..., :v_head_dim]
    raise ValueError(f"{layout=} is none of {', '.join(LAYOUTS)}")


def _normal(shape: tuple[int, ...], gen: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Normal values drawn on the CPU, so that a seed gives the same batch on every device."""
    return torch.randn(shape, generator=gen).to(dtype).to(device)


def _starts(lens: Sequence[int]) -> Tensor:
    """`[len(lens) + 1]` int32: 0, then the running sum."""
    return torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).int()


def _page_table(
    kv_lens: Sequence[int], page_size: int, num_spare_pages: int, num_spare_columns: int, filler: int, gen: torch.Generator
) -> Tensor:
    """`[num_seqs, max_pages]` int32 of shuffled page ids, `filler` past each sequence's last page."""
    counts = [-(-n // page_size) for n in kv_lens]
    table = torch.full((len(kv_lens), max(counts, default=0) + num_spare_columns), filler, dtype=torch.int32)
    ids = torch.randperm(sum(counts) + num_spare_pages, generator=gen).int()
    begin = 0
    for seq, count in enumerate(counts):
        table[seq, :count] = ids[begin : begin + count]
        begin += count
    return table
