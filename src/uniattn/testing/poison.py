"""NaN and Inf where nothing may be read, so that a read shows in the output.

`make_batch` already fills unused pages, page tails and the gaps of strided caches; this file adds what depends on the options
(tokens outside every window), the output buffers, and the memory that the library itself allocates.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from uniattn import reference
from uniattn.testing.batches import Batch


def read_slots(batch: Batch) -> Tensor:
    """Bool `[num_pages, page_size]` (`[num_kv_tokens]` where K/V are contiguous): which slots some query of the batch sees."""
    read = torch.zeros(batch.k_cache.shape[:-2], dtype=torch.bool, device=batch.k_cache.device)
    causal, window = batch.options.get("causal", True), batch.options.get("window")
    kv_lens = [kv_len for _, kv_len in batch.lengths]
    for seq, (q_len, kv_len) in enumerate(batch.lengths):
        causal_here = bool(causal[seq]) if isinstance(causal, Tensor) else causal
        seen = reference.visible(q_len, kv_len, causal_here, window, read.device).any(dim=0).nonzero().flatten()
        read[reference.locate(seq, seen, kv_lens, batch.k_cache, batch.page_table, batch.cu_seqlens_k)] = True
    return read


def poison_unread(batch: Batch, value: float = torch.nan) -> Batch:
    """Write `value` into every slot of both caches that no query sees, in place; returns the batch."""
    unread = ~read_slots(batch)
    batch.k_cache[unread] = value
    batch.v_cache[unread] = value
    return batch


def poison_page_table(batch: Batch, value: int) -> Batch:
    """Write `value` into every page-table entry whose page no query sees, those before a window included, in place."""
    assert batch.page_table is not None, "contiguous K/V have no page table"
    page_size = batch.k_cache.shape[1]
    read = read_slots(batch).any(dim=1)
    for seq, (_, kv_len) in enumerate(batch.lengths):
        for column in range(batch.page_table.shape[1]):
            inside = column * page_size < kv_len
            if not inside or not read[batch.page_table[seq, column]]:
                batch.page_table[seq, column] = value
    return batch


def poisoned_out(batch: Batch, gap: int = 0) -> Tensor:
    """An `out` buffer full of NaN, `[num_tokens, num_q_heads, v_head_dim]`, with `gap` elements between heads."""
    num_tokens, num_q_heads, _ = batch.q.shape
    v_head_dim = batch.v_cache.shape[-1]
    storage = torch.full((num_tokens, num_q_heads, v_head_dim + gap), torch.nan, dtype=batch.dtype, device=batch.q.device)
    return storage[..., :v_head_dim]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """While active, memory that torch hands out uninitialised (`empty`, `new_empty`, ...) holds NaN, or the largest integer.

    It finds a kernel that leaves part of an output or of its scratch unwritten. It uses torch's deterministic mode, which alone
    fills such memory.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]
