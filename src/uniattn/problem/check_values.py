"""What the device's values must be: lengths, offsets, page ids, slots. Opt-in, since reading them waits for the device.

`UNIATTN_CHECK_VALUES=1`, read when uniattn is imported, makes `attention` and `write_kv` check each eager call. Calls that are
being compiled or captured into a CUDA graph have no values yet and are not checked.
"""

import os

import torch
from torch import Tensor

from uniattn import planning
from uniattn.errors import ArgumentError
from uniattn.problem import validate, validate_plan
from uniattn.problem.layout import window_bounds
from uniattn.schedule.plan import Plan

ENABLED = os.environ.get("UNIATTN_CHECK_VALUES", "0") not in ("", "0")


def readable(x: Tensor) -> bool:
    """Whether values on `x`'s device can be read now."""
    return not (torch.compiler.is_compiling() or x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def check_values(
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
    mask: object | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_format: str | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    deterministic: bool = False,
) -> None:
    """Check a call of `uniattn.attention` with these arguments, the values on the device included; waits for the device.

    Beyond what `attention` checks by itself: offsets start at 0 and never fall, lengths are at least 0, `cu_seqlens_q[-1]` is at
    most num_tokens, contiguous segments lie within K/V, the page table is wide enough for each length, the ids of visible pages
    exist, `max_seqlen_*` are upper bounds, and a plan was built from this call's lengths.

    Raises:
        ArgumentError: as `attention`; the message names the first wrong element.
        UnsupportedError: as `attention`.

    >>> import torch, uniattn
    >>> q, (k_cache, v_cache) = torch.randn(1, 8, 64), torch.randn(2, 10, 4, 2, 64)
    >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> uniattn.check_values(q, k_cache, v_cache, cu_seqlens_q=ints(0, 1), seqlens_k=ints(5), page_table=ints([3, 10]))
    Traceback (most recent call last):
    uniattn.errors.ArgumentError: page_table[0, 1]: got 10; the page is visible and must be in [0, num_pages) = [0, 10); check ...
    """
    validate.unserved(mask=mask, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, kv_format=kv_format, out_scale=out_scale)
    validate.attention(
        q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window, softcap, sinks, alibi_slopes, out, return_lse, deterministic,
    )  # fmt: skip
    attention_values(q, k_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    if plan is not None:
        validate_plan.of_call(plan, q, k_cache, v_cache, cu_seqlens_q, causal, window)
        plan_values(plan, k_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, causal)


def attention_values(
    q: Tensor,
    k_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    window: tuple[int | None, int | None] | None,
) -> None:
    """Check the values of an `attention` call whose shapes and dtypes are right."""
    num_tokens = q.shape[0]
    q_offsets = cu_seqlens_q.long().cpu()
    _check_offsets("cu_seqlens_q", q_offsets, num_tokens, "num_tokens")
    q_lens = q_offsets.diff()
    if max_seqlen_q is not None:
        _check_at_most("max_seqlen_q", max_seqlen_q, q_lens, "query tokens")

    kv_lens = torch.empty(0, dtype=torch.int64)
    if cu_seqlens_k is not None:
        k_offsets = cu_seqlens_k.long().cpu()
        num_kv_tokens = None if page_table is not None else k_cache.shape[0]
        _check_offsets("cu_seqlens_k", k_offsets, num_kv_tokens, "num_kv_tokens")
        kv_lens = k_offsets.diff()
    if seqlens_k is not None:
        segments = kv_lens
        kv_lens = seqlens_k.long().cpu()
        _check_lengths(kv_lens, segments if cu_seqlens_k is not None else None, k_cache.shape[0], page_table is None)
    if max_seqlen_k is not None:
        _check_at_most("max_seqlen_k", max_seqlen_k, kv_lens, "KV tokens")
    if page_table is not None:
        # Some query token sees every KV token from `first` on: the last one stands at kv_len - 1, whatever causal and right are.
        first = (kv_lens - q_lens - window_bounds(window)[0]).clamp_min(0)
        end = torch.where(q_lens > 0, kv_lens, 0)
        _check_pages(page_table.long().cpu(), kv_lens, first, end, num_pages=k_cache.shape[0], page_size=k_cache.shape[1])


def write_kv_values(k_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check the slots of a `write_kv` call: each -1 or within the cache, and none twice."""
    slots = slot_mapping.long().cpu()
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    bad = (slots < -1) | (slots >= num_slots)
    if bad.any():
        i = _first(bad)
        raise ArgumentError(
            f"slot_mapping[{i}]",
            int(slots[i]),
            f"a slot is page * page_size + place in the page, below num_pages * page_size = {num_slots}, or -1",
            "check the slots, or pass -1 to skip a token",
        )
    written = slots[slots >= 0]
    unique, counts = written.unique(return_counts=True)
    if (counts > 1).any():
        slot = int(unique[counts > 1][0])
        rows = (slots == slot).nonzero().flatten().tolist()
        raise ArgumentError(
            "slot_mapping",
            f"slot {slot} for rows {rows[0]} and {rows[1]}",
            "two tokens in one slot race, and either may stay",
            "give each token a slot of its own",
        )


def _check_offsets(name: str, offsets: Tensor, limit: int | None, limit_name: str) -> None:
    if offsets[0] != 0:
        raise ArgumentError(f"{name}[0]", int(offsets[0]), "offsets start at 0", "prepend 0 to the running sum of the lengths")
    falls = offsets.diff() < 0
    if falls.any():
        i = _first(falls)
        raise ArgumentError(
            f"{name}[{i + 1}]",
            f"{int(offsets[i + 1])} after {int(offsets[i])}",
            "offsets never fall; an empty sequence repeats one",
            "pass the running sum of the lengths",
        )
    if limit is not None and offsets[-1] > limit:
        raise ArgumentError(
            f"{name}[-1]", int(offsets[-1]), f"it must be at most {limit_name} = {limit}", "pass the offsets of these tokens"
        )


def _check_lengths(kv_lens: Tensor, segments: Tensor | None, num_kv_tokens: int, contiguous: bool) -> None:
    if (kv_lens < 0).any():
        i = _first(kv_lens < 0)
        raise ArgumentError(f"seqlens_k[{i}]", int(kv_lens[i]), "a length is at least 0", "pass 0 for an empty sequence")
    if segments is not None and (kv_lens > segments).any():
        i = _first(kv_lens > segments)
        raise ArgumentError(
            f"seqlens_k[{i}]",
            int(kv_lens[i]),
            f"cu_seqlens_k gives sequence {i} a segment of {int(segments[i])} tokens",
            "make the segment as long as the sequence",
        )
    if contiguous and segments is None and kv_lens.sum() > num_kv_tokens:
        raise ArgumentError(
            "seqlens_k",
            f"lengths that add up to {int(kv_lens.sum())}",
            f"k_cache holds num_kv_tokens = {num_kv_tokens}, densely packed",
            "pass cu_seqlens_k where the segments start elsewhere",
        )


def _check_at_most(name: str, bound: int, lengths: Tensor, what: str) -> None:
    if (lengths > bound).any():
        i = _first(lengths > bound)
        raise ArgumentError(
            name,
            bound,
            f"sequence {i} has {int(lengths[i])} {what}, and {name} bounds them all",
            f"raise {name}, or leave it out",
        )


def _check_pages(table: Tensor, kv_lens: Tensor, first: Tensor, end: Tensor, *, num_pages: int, page_size: int) -> None:
    room = table.shape[1] * page_size
    if (kv_lens > room).any():
        i = _first(kv_lens > room)
        raise ArgumentError(
            "page_table",
            f"{table.shape[1]} pages of {page_size} tokens a sequence",
            f"sequence {i} has {int(kv_lens[i])} KV tokens",
            f"widen the table to at least {-(-int(kv_lens[i]) // page_size)} pages",
        )
    page = torch.arange(table.shape[1])
    read = (page >= first[:, None] // page_size) & (page * page_size < end[:, None]) & (first < end)[:, None]
    bad = read & ((table < 0) | (table >= num_pages))
    if bad.any():
        seq, place = (int(x) for x in bad.nonzero()[0])
        raise ArgumentError(
            f"page_table[{seq}, {place}]",
            int(table[seq, place]),
            f"the page is visible and must be in [0, num_pages) = [0, {num_pages})",
            "check the table: only pages past a sequence's end or outside its window may hold anything",
        )


def _first(flags: Tensor) -> int:
    return int(flags.nonzero()[0])


def plan_values(
    plan: Plan,
    k_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool | Tensor,
) -> None:
    """Raise where `plan`, right for the call but for its lengths, was built from other lengths."""
    fresh = Plan(plan.spec, torch.empty_like(plan.buffer))
    planning.build(fresh, k_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, causal)
    records, fresh_records = plan.records(), fresh.records()
    if records != fresh_records:
        raise ArgumentError(
            "plan",
            f"a plan of {len(records)} records that is not that of this call's lengths ({len(fresh_records)} records)",
            "a plan holds the lengths that it was built from",
            "rebuild it each step: uniattn.plan(..., out=plan)",
        )
