"""The oracle: attention, merge and cache write in float64, written to be obviously right rather than fast.

Each function has the signature of its twin in `uniattn` and returns new tensors instead of writing into the caller's. It follows
the definitions one sequence and one head at a time, reads only keys that some query sees, and shares no code with the kernels.
"""

import math

import torch
from torch import Tensor

from uniattn.problem.layout import window_bounds


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: None = None,
    q_scale: None = None,
    k_scale: None = None,
    v_scale: None = None,
    kv_format: None = None,
    out: Tensor | None = None,
    out_scale: None = None,
    return_lse: bool = True,
    plan: object | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch in float64. Arguments as `uniattn.attention` takes them.

    `max_seqlen_*`, `out`, `return_lse`, `plan` and `deterministic` do not change what is right and are ignored.

    Returns:
        `out` `[num_tokens, num_q_heads, v_head_dim]` float64, and `lse` `[num_q_heads, num_tokens]` float64, natural log.
        A row that sees no key is 0 and -inf (with sinks 0 and the sink); rows past `cu_seqlens_q[-1]` are 0 and -inf.
    """
    if any(value is not None for value in (mask, q_scale, k_scale, v_scale, kv_format, out_scale)):
        raise NotImplementedError("the oracle knows no mask, scales or quantised formats yet")

    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v_cache.shape[-2:]
    group = num_q_heads // num_kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q_starts = cu_seqlens_q.tolist()
    num_seqs = len(q_starts) - 1
    kv_lens = sequence_lengths(seqlens_k, cu_seqlens_k)
    causals = causal.tolist() if isinstance(causal, Tensor) else [causal] * num_seqs

    result = torch.zeros(num_tokens, num_q_heads, v_head_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((num_q_heads, num_tokens), -math.inf, dtype=torch.float64, device=q.device)
    for seq in range(num_seqs):
        q_rows = slice(q_starts[seq], q_starts[seq + 1])
        q_len, kv_len = q_starts[seq + 1] - q_starts[seq], kv_lens[seq]
        sees = visible(q_len, kv_len, bool(causals[seq]), window, q.device)
        sees[:, num_stored(seq, kv_len, k_cache, page_table, cu_seqlens_k) :] = False
        keys = sees.any(dim=0).nonzero().flatten()  # the positions that are read at all
        sees = sees[:, keys]
        where = locate(seq, keys, kv_lens, k_cache, page_table, cu_seqlens_k)
        distance = (torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len - keys[None, :]).abs().double()

        for head in range(num_q_heads):
            k = k_cache[..., head // group, :][where].double()
            v = v_cache[..., head // group, :][where].double()
            scores = q[q_rows, head].double() @ k.T * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[head].double() * distance
            scores = scores.masked_fill(~sees, -math.inf)
            if sinks is not None:
                # A sink is one more key, with a score of its own and a value of 0.
                scores = torch.cat([scores, sinks[head].double().expand(q_len, 1)], dim=1)
                v = torch.cat([v, v.new_zeros(1, v_head_dim)])
            lse[head, q_rows] = torch.logsumexp(scores, dim=1)
            weights = torch.exp(scores - lse[head, q_rows, None])
            weights = torch.where(lse[head, q_rows, None] > -math.inf, weights, 0.0)
            result[q_rows, head] = weights @ v
    return result, lse


def sequence_lengths(seqlens_k: Tensor | None, cu_seqlens_k: Tensor | None) -> list[int]:
    """KV tokens of each sequence, from whichever of the two was given; `seqlens_k` wins."""
    if seqlens_k is not None:
        return seqlens_k.tolist()
    assert cu_seqlens_k is not None, "give seqlens_k or cu_seqlens_k"
    return cu_seqlens_k.diff().tolist()


def visible(q_len: int, kv_len: int, causal: bool, window: tuple[int | None, int | None] | None, device: torch.device) -> Tensor:
    """Bool `[q_len, kv_len]`: may query `i` see key `j`?

    The last query stands at the last key, so query `i` stands at position `i + kv_len - q_len`. It sees the keys from `left`
    before to `right` after its position, both ends included; a causal sequence has `right` = 0.
    """
    left, right = window_bounds(window)
    if causal:
        right = 0
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None, :]
    return (key >= position - left) & (key <= position + right)


def num_stored(seq: int, kv_len: int, k_cache: Tensor, page_table: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    """How many of a sequence's keys have a place: positions past its page-table row, or past its own K/V rows, have none."""
    if page_table is not None:
        return min(kv_len, page_table.shape[1] * k_cache.shape[1])
    if cu_seqlens_k is not None:
        return min(kv_len, int(cu_seqlens_k[seq + 1] - cu_seqlens_k[seq]))
    return kv_len


def locate(
    seq: int, keys: Tensor, kv_lens: list[int], k_cache: Tensor, page_table: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, ...]:
    """Where the positions `keys` of one sequence lie in the caches: `(page, slot)` where paged, else `(row,)`."""
    if page_table is not None:
        page_size = k_cache.shape[1]
        return page_table[seq, keys // page_size].long(), keys % page_size
    start = int(cu_seqlens_k[seq]) if cu_seqlens_k is not None else sum(kv_lens[:seq])
    return (start + keys,)


def merge_states(outs: Tensor | list[Tensor], lses: Tensor | list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over disjoint sets of keys.

    Args:
        outs: `[num_parts, num_tokens, num_heads, v_head_dim]`, or a list of parts. A part whose LSE is -inf may hold anything.
        lses: `[num_parts, num_heads, num_tokens]`, natural log.

    Returns:
        `out` and `lse` of all keys together, float64; 0 and -inf where every part is empty.
    """
    merged_out = torch.zeros_like(outs[0], dtype=torch.float64)
    merged_lse = torch.full_like(lses[0], -math.inf, dtype=torch.float64)
    for part_lse in lses:
        merged_lse = torch.logaddexp(merged_lse, part_lse.double())
    for part_out, part_lse in zip(outs, lses, strict=True):
        share = torch.exp(part_lse.double() - merged_lse)  # NaN where both are -inf
        share = torch.where(part_lse > -math.inf, share, 0.0).T[:, :, None]
        merged_out += torch.where(share > 0, part_out.double() * share, 0.0)
    return merged_out, merged_lse


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """What both caches hold after token `t` went to slot `slot_mapping[t]`; the caches given stay as they are.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]` and `[num_tokens, num_kv_heads, v_head_dim]`.
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, ...]`.
        slot_mapping: `[num_tokens]` int; slot `s` is page `s // page_size`, row `s % page_size`; slots below 0 are skipped.
    """
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    page_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // page_size, slot % page_size] = k[token]
            v_cache[slot // page_size, slot % page_size] = v[token]
    return k_cache, v_cache
