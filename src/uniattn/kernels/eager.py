"""The reference path: attention in vectorised torch, a loop over sequences. It serves CPU tensors; the kernels' slow twin.

Products and softmax are computed in fp32 whatever the input dtype. Lengths are read on the host, so on a GPU it synchronises.
"""

import itertools

import torch
from torch import Tensor

# Scores held at once; bounds the memory of long prompts to about 64 MiB a temporary.
_MAX_SCORES = 1 << 24


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float,
    causal: bool,
    causal_per_seq: Tensor | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write attention of a batch into `out` and `lse`; arguments as `uniattn.ops.attend` flattens them."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    starts_q = cu_seqlens_q.tolist()
    starts_k = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
    if seqlens_k is not None:
        kv_lens = seqlens_k.tolist()
    else:
        assert starts_k is not None
        kv_lens = [b - a for a, b in itertools.pairwise(starts_k)]
    causals = [causal] * len(kv_lens) if causal_per_seq is None else causal_per_seq.tolist()
    num_kv_heads = k_cache.shape[-2]
    group = q.shape[1] // num_kv_heads
    sink = None if sinks is None else sinks.float().view(num_kv_heads, group, 1)
    slopes = None if alibi_slopes is None else alibi_slopes.float().view(num_kv_heads, group, 1, 1)

    for seq, kv_len in enumerate(kv_lens):
        q_begin, q_end = starts_q[seq], starts_q[seq + 1]
        first_pos = kv_len - (q_end - q_begin)
        right = 0 if causals[seq] else window_right
        if page_table is not None:
            num_readable = min(kv_len, page_table.shape[1] * k_cache.shape[1])
        else:
            assert starts_k is not None
            num_readable = min(kv_len, starts_k[seq + 1] - starts_k[seq])
        step = max(1, _MAX_SCORES // max(1, q.shape[1] * kv_len))
        for begin in range(q_begin, q_end, step):
            end = min(begin + step, q_end)
            pos = torch.arange(begin - q_begin, end - q_begin, device=q.device) + first_pos
            pos_first, pos_last = first_pos + begin - q_begin, first_pos + end - 1 - q_begin
            lo = max(0, pos_first - window_left)
            hi = min(num_readable, pos_last + right + 1)
            if hi > lo:
                kv_idx = torch.arange(lo, hi, device=q.device)
                k, v = _read(k_cache, v_cache, kv_idx, seq, page_table, None if starts_k is None else starts_k[seq])
                scores = torch.einsum("qhgd,khd->hgqk", q[begin:end].float().unflatten(1, (num_kv_heads, group)), k)
                scores *= softmax_scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                dist = pos[:, None] - kv_idx[None, :]
                if slopes is not None:
                    scores = scores - slopes * dist.abs()
                hidden = (dist > window_left) | (dist < -right)
                scores.masked_fill_(hidden, -torch.inf)
                row_max = scores.amax(-1)
                if sink is not None:
                    row_max = torch.maximum(row_max, sink)
                pivot = row_max.clamp_min(torch.finfo(torch.float32).min)
                p = torch.exp(scores - pivot[..., None])
                total = p.sum(-1)
                if sink is not None:
                    total = total + torch.exp(sink - pivot)
                o = torch.einsum("hgqk,khd->qhgd", p, v)
                o = o / total.clamp_min(torch.finfo(torch.float32).tiny).permute(2, 0, 1)[..., None]
                out[begin:end] = o.flatten(1, 2).to(out.dtype)
                row_lse = pivot + torch.log(total)
            else:
                shape = (num_kv_heads, group, end - begin)
                row_lse = q.new_full(shape, -torch.inf, dtype=torch.float32) if sink is None else sink.expand(shape)
            if lse is not None:
                lse[:, begin:end] = row_lse.flatten(0, 1)


def _read(
    k_cache: Tensor, v_cache: Tensor, kv_idx: Tensor, seq: int, page_table: Tensor | None, start_k: int | None
) -> tuple[Tensor, Tensor]:
    """K and V of the KV tokens `kv_idx` of one sequence, `[len(kv_idx), num_kv_heads, dim]`, in fp32."""
    if page_table is None:
        assert start_k is not None
        rows = kv_idx + start_k
        return k_cache[rows].float(), v_cache[rows].float()
    page_size = k_cache.shape[1]
    pages = page_table[seq, kv_idx // page_size].long()
    return k_cache[pages, kv_idx % page_size].float(), v_cache[pages, kv_idx % page_size].float()


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Write the merge of `outs` `[num_parts, num_tokens, num_heads, dim]` by `lses` `[num_parts, num_heads, num_tokens]`."""
    top = lses.amax(0)
    pivot = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(lses - pivot)
    total = weights.sum(0)
    share = (weights / total.clamp_min(torch.finfo(torch.float32).tiny)).transpose(1, 2)[..., None]
    # A part of weight 0 may hold anything, NaN included.
    out.copy_(torch.where(share > 0, outs.float() * share, 0.0).sum(0))
    if lse is not None:
        lse.copy_(torch.where(top > -torch.inf, pivot + torch.log(total), -torch.inf))


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new K/V tokens into their slots; slots below 0 or past the cache are skipped."""
    page_size = k_cache.shape[1]
    keep = (slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * page_size)
    slots = slot_mapping[keep].long()
    k_cache[slots // page_size, slots % page_size] = k[keep]
    v_cache[slots // page_size, slots % page_size] = v[keep]



