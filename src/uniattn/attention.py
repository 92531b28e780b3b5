"""The front door: `attention`, `plan`, `merge_states`, `write_kv`. Validate, then launch."""

from collections.abc import Sequence
from dataclasses import fields
from operator import index
from typing import Any

import torch
from torch import Tensor

from uniattn import ops, planning
from uniattn.launch import choice
from uniattn.launch.target import target_of
from uniattn.problem import check_values, validate, validate_kv, validate_plan
from uniattn.problem.layout import causal_code, window_bounds
from uniattn.schedule.plan import Plan, PlanSpec, make_spec
from uniattn.schedule.tiles import Tiles


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a batch of sequences, each with any number of query tokens, over paged or contiguous K/V.

    Prefill, decode and chunks between them are one case: sequence `s` has `q_len = cu_seqlens_q[s + 1] - cu_seqlens_q[s]` query
    tokens, which are the last of its `kv_len` KV tokens. The K and V of the query tokens are in the cache already (`write_kv`).
    Query token `t` of a sequence stands at position `i = kv_len - q_len + t`. Its score with KV token `j` is::

        s_ij = softcap * tanh(softmax_scale * q_i . k_j / softcap) - alibi_slope * |i - j|

    where softcap and slope are given, and `-inf` where `j` is masked. A row's softmax runs over its scores and its head's sink.

    Lengths are in tokens, all tensors on one device, index tensors contiguous. Nothing is read from the device, so a call can be
    captured into a CUDA graph and traced by `torch.compile(fullgraph=True)`.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, float16, bfloat16 or float32, last stride 1. Query tokens of all sequences, one
            after another. `num_q_heads` is a multiple of `num_kv_heads`: query head `h` reads KV head `h // (num_q_heads //
            num_kv_heads)`. `head_dim` is 8 to 576.
        k_cache: paged `[num_pages, page_size, num_kv_heads, head_dim]`, any page size from 1; without `page_table` contiguous
            `[num_kv_tokens, num_kv_heads, head_dim]`. q's dtype, last stride 1, other strides free.
        v_cache: as `k_cache`, with a `head_dim_v` of its own, 8 to 512. May share memory with `k_cache`.
        cu_seqlens_q: `[num_seqs + 1]` int32. Sequence `s` owns the query tokens `[cu_seqlens_q[s], cu_seqlens_q[s + 1])`. Starts
            at 0, never falls; equal neighbours are a sequence without query tokens. Tokens from `cu_seqlens_q[-1]` are padding.
        seqlens_k: `[num_seqs]` int32, each sequence's `kv_len`, the query tokens included; may be 0, or less than `q_len`.
        page_table: `[num_seqs, max_pages]` int32, last stride 1. KV token `j` of sequence `s` lies in page
            `page_table[s, j // page_size]` at place `j % page_size`. Entries that no visible token needs may hold anything.
            None: K/V are contiguous.
        cu_seqlens_k: `[num_seqs + 1]` int32, as `cu_seqlens_q`. With a page table it stands in for `seqlens_k` (give one of the
            two). Contiguous K/V: sequence `s` starts at `cu_seqlens_k[s]`; its length is that of its segment, or `seqlens_k[s]`
            where both are given. Contiguous K/V with `seqlens_k` alone are densely packed.
        max_seqlen_q: host int, at least every `q_len`; a loose bound costs at most speed. None: `num_tokens`.
        max_seqlen_k: host int, at least every `kv_len`, may exceed the table. None: `max_pages * page_size`, or `num_kv_tokens`.
        softmax_scale: finite, more than 0. None: `head_dim ** -0.5`.
        causal: True: `j <= i`. False: all KV tokens. A bool tensor `[num_seqs]` chooses for each sequence.
        window: `(left, right)`, closed interval: `i - left <= j <= i + right`. So `left=W` shows `W + 1` tokens, the own one
            included, as in FlashAttention. -1 or None on a side: no limit. None: no window. Causal sequences ignore `right`.
        softcap: finite, at least 0; 0 is off.
        sinks: `[num_q_heads]`, float16, bfloat16 or float32. A score for each head that joins the softmax but has no value.
        alibi_slopes: `[num_q_heads]` float32.
        out: `[num_tokens, num_q_heads, head_dim_v]`, q's dtype, last stride 1, to write into; must not overlap q or the caches.
            None: allocated.
        return_lse: also return the LSE.
        plan: what `uniattn.plan` built from this call's lengths, sizes, causality and window. None: built here. Its sizes are
            constants to `torch.compile`, which compiles anew for each; without a plan sizes may be symbolic.
        deterministic: promise bitwise equal results for equal calls. Every path of this version keeps that promise anyway.
        mask, q_scale, k_scale, v_scale, kv_format, out_scale: reserved; anything but None raises `UnsupportedError`.

    Returns:
        `out`, or `(out, lse)`. `lse` is `[num_q_heads, num_tokens]` float32, natural logarithm:
        `lse_i = log(sum_j exp(s_ij) + exp(sink))`. A row that sees no key has `out` 0 and `lse` `-inf`, or the sink where there
        are sinks; a padding row always 0 and `-inf`.

    Raises:
        ArgumentError: an argument is wrong; nothing was launched or written. Values on the device are checked on request only, by
            `uniattn.check_values` or `UNIATTN_CHECK_VALUES=1`.
        UnsupportedError: this version, chip or installation cannot serve the call.

    Example: a prefill of 3 tokens and a decode over 5 KV tokens in one call, pages of 4 tokens.

    >>> import torch, uniattn
    >>> q = torch.randn(4, 8, 64)  # 3 + 1 query tokens, 8 query heads
    >>> k_cache, v_cache = torch.randn(2, 10, 4, 2, 64)  # 10 pages, 2 KV heads
    >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> batch = dict(cu_seqlens_q=ints(0, 3, 4), seqlens_k=ints(3, 5), page_table=ints([7, -1], [2, 5]))
    >>> out, lse = uniattn.attention(q, k_cache, v_cache, **batch, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([4, 8, 64]), torch.Size([8, 4]))
    >>> torch.allclose(out[0], v_cache[7, 0].repeat_interleave(4, dim=0))  # the first prefill token sees itself alone
    True
    """
    if not (mask is q_scale is k_scale is v_scale is kv_format is out_scale is None):
        validate.unserved(mask=mask, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, kv_format=kv_format, out_scale=out_scale)
    validate.attention(
        q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window, softcap, sinks, alibi_slopes, out, return_lse, deterministic,
    )  # fmt: skip
    if check_values.ENABLED and check_values.readable(q):
        check_values.attention_values(
            q, k_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window
        )  # fmt: skip
    num_tokens, num_q_heads, head_dim = q.shape
    window_left, window_right = window_bounds(window)
    if plan is not None:
        validate_plan.of_call(plan, q, k_cache, v_cache, cu_seqlens_q, causal, window)
        if check_values.ENABLED and check_values.readable(q):
            check_values.plan_values(plan, k_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, causal)
    if out is None:
        out = q.new_empty((num_tokens, num_q_heads, v_cache.shape[-1]))
    lse = q.new_empty((num_q_heads, num_tokens), dtype=torch.float32) if return_lse else None
    watched = ops.watched(q, k_cache, v_cache, cu_seqlens_q, out)
    attend = torch.ops.uniattn.attend if watched else ops.attend
    spec, buffer = (None, None) if plan is None else (plan.spec.as_ints() if watched else plan.spec, plan.buffer)
    attend(
        q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, planning.offsets_k(seqlens_k, page_table, cu_seqlens_k),
        num_tokens if max_seqlen_q is None else max_seqlen_q, head_dim**-0.5 if softmax_scale is None else softmax_scale,
        causal is True, causal if isinstance(causal, Tensor) else None, window_left, window_right, softcap, sinks, alibi_slopes,
        spec, buffer, out, lse,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def plan(
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
    causal: bool | Tensor = True,
    window: tuple[int | None, int | None] | None = None,
    num_splits: int | None = None,
    tiles: Tiles | None = None,
    out: Plan | None = None,
) -> Plan:
    """Cut a batch into work items, on the device: once a step, shared by its layers through `attention(plan=...)`.

    A plan depends on the lengths, causality and window, and on the sizes of q and the caches; not on page ids or values. It is
    built without reading the device, so it can be captured into a CUDA graph. (The reference path builds the same list in Python.)

    Args:
        q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window: as in
            `attention`. Of q and the caches only shapes and dtypes matter.
        num_splits: pieces that each query tile's visible K/V is cut into, 1 to 128, as far as it is long enough; they run side
            by side and are merged. Batches of more than 1024 query tiles are not cut: there only 1 will do. None: cut where that
            balances the chip.
        tiles: block sizes to force, a `uniattn.schedule.tiles.Tiles`. None: chosen.
        out: a plan to rebuild in place, of the same sizes, causality and window, made with the same `max_seqlen_q`, `num_splits`
            and `tiles`. None: a new one.

    Returns:
        The plan. A call whose sizes, causality or window differ from the plan's raises `ArgumentError`; one whose lengths
        differ gives wrong results or reads past the page table, as nothing tells them apart without reading the device
        (`uniattn.check_values` and `UNIATTN_CHECK_VALUES=1` do). It holds counters that a call uses, so one plan must not be in calls
        on two streams at once.

    Raises:
        ArgumentError: an argument is wrong, or `out` is a plan of another kind; nothing was written.
        UnsupportedError: as `attention`, or `num_splits` above 1 for more tiles than are cut.

    >>> import torch, uniattn
    >>> q, (k_cache, v_cache) = torch.randn(2, 8, 64), torch.randn(2, 10, 4, 2, 64)
    >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> batch = dict(cu_seqlens_q=ints(0, 1, 2), seqlens_k=ints(9, 6), page_table=ints([0, 1, 2], [3, 4, 5]))
    >>> step = uniattn.plan(q, k_cache, v_cache, **batch)
    >>> uniattn.attention(q, k_cache, v_cache, **batch, plan=step).shape
    torch.Size([2, 8, 64])
    """
    validate.attention(
        q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
        causal=causal, window=window, softcap=0.0, sinks=None, alibi_slopes=None, out=None, return_lse=False, deterministic=False,
    )  # fmt: skip
    validate_plan.num_splits(num_splits)
    kernels = choice.kernels(k_cache, v_cache, page_table)
    validate_plan.tiles(tiles, kernels, q.shape[2], v_cache.shape[-1], q.element_size(), q.device)
    window_left, window_right = window_bounds(window)
    sizes = (
        q.shape[0], cu_seqlens_q.shape[0] - 1, q.shape[1], k_cache.shape[-2], q.shape[2], v_cache.shape[-1], q.element_size(),
        causal_code(causal), window_left, window_right, q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        0 if page_table is None else k_cache.shape[1],
    )  # fmt: skip
    if torch.compiler.is_compiling():
        forced = None if tiles is None else tuple([getattr(tiles, field.name) for field in fields(tiles)])
        spec = PlanSpec(*_traced_spec(*[index(size) for size in sizes], q.device, kernels, num_splits or 0, forced))
    else:
        spec = make_spec(*sizes, target_of(q.device), kernels, num_splits or 0, tiles)
    validate_plan.can_be_cut(spec)
    if out is None:
        out = Plan(spec, cu_seqlens_q.new_empty(spec.buffer_ints))
    else:
        validate_plan.to_rebuild(out, spec, cu_seqlens_q.device)
    planning.build(out, k_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, causal)
    return out


@torch.compiler.assume_constant_result
def _traced_spec(*sizes_and_choices: Any) -> tuple[int, ...]:
    """`make_spec` as a constant of a traced call: what it chooses may come from a file, which a compiler cannot trace.

    It takes and returns plain values, since compilers before torch 2.12 turn no dataclass into a constant.
    """
    *sizes, device, kernels, num_splits, tiles = sizes_and_choices
    return tuple(make_spec(*sizes, target_of(device), kernels, num_splits, None if tiles is None else Tiles(*tiles)).as_ints())


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint keys into the result over all of them.

    With `w_p = exp(lse_p - lse)` and `lse = log(sum_p exp(lse_p))`, `out` is the sum of `w_p * out_p` over the parts `p`. It
    serves shared prefixes (cascade) and K/V spread over devices (context parallel). A row that no part has a key for gives 0 and
    `-inf`. A sink belongs to one part alone, since each part's LSE includes the sink it was given.

    Args:
        outs: a list of `[num_tokens, num_q_heads, head_dim_v]`, or one tensor with the parts as its first dim; float16, bfloat16
            or float32, last stride 1. A part's row with LSE `-inf` may hold anything, NaN included.
        lses: as many `[num_q_heads, num_tokens]` float32, natural logarithms, as `attention(..., return_lse=True)` returns them.

    Returns:
        `(out, lse)`, new tensors of the shape and dtype of one part.

    Raises:
        ArgumentError: as `attention`.

    Example: the first two and the last three of five keys, attended apart.

    >>> import torch, uniattn
    >>> q, k, v = torch.randn(1, 2, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> def attend(keys):
    ...     batch = dict(cu_seqlens_q=ints(0, 1), seqlens_k=ints(len(k[keys])))
    ...     return uniattn.attention(q, k[keys], v[keys], **batch, causal=False, return_lse=True)
    >>> (out_a, lse_a), (out_b, lse_b) = attend(slice(0, 2)), attend(slice(2, 5))
    >>> out, lse = uniattn.merge_states([out_a, out_b], [lse_a, lse_b])
    >>> torch.allclose(out, attend(slice(0, 5))[0], atol=1e-6)
    True
    """
    validate_kv.merge_states(outs, lses)
    outs = outs if isinstance(outs, Tensor) else torch.stack(tuple(outs))
    lses = lses if isinstance(lses, Tensor) else torch.stack(tuple(lses))
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    merge = torch.ops.uniattn.merge if ops.watched(outs, lses) else ops.merge
    merge(outs, lses, out, lse)
    return out, lse


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the K and V of new tokens into a paged cache.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`, float16, bfloat16 or float32, last stride 1.
        v: `[num_tokens, num_kv_heads, head_dim_v]`, as `k`.
        k_cache: `[num_pages, page_size, num_kv_heads, head_dim]`, k's dtype, last stride 1, other strides free. Written in place.
        v_cache: `[num_pages, page_size, num_kv_heads, head_dim_v]`, as `k_cache`. Written in place.
        slot_mapping: `[num_tokens]` int32 or int64. Token `t` goes to page `slot_mapping[t] // page_size`, place
            `slot_mapping[t] % page_size`; -1 skips it. No slot may come twice.

    Raises:
        ArgumentError: an argument is wrong, or a cache shares an element with itself, the other cache, `k` or `v`; nothing was
            written. The caches may be views of one packed buffer, and `v_cache` may be a view of `k_cache` where `v` is the same
            view of `k`. Slots are checked under `UNIATTN_CHECK_VALUES=1` only; without it a slot outside the cache is skipped.

    >>> import torch, uniattn
    >>> k, v = torch.ones(2, 2, 64), torch.ones(2, 2, 64)
    >>> k_cache, v_cache = torch.zeros(2, 10, 4, 2, 64)
    >>> uniattn.write_kv(k, v, k_cache, v_cache, torch.tensor([6, -1]))
    >>> k_cache[1, 2].sum().item(), k_cache.sum().item()  # slot 6 is page 1, place 2
    (128.0, 128.0)
    """
    validate_kv.write_kv(k, v, k_cache, v_cache, slot_mapping)
    if check_values.ENABLED and check_values.readable(k):
        check_values.write_kv_values(k_cache, slot_mapping)
    write = torch.ops.uniattn.write_kv if ops.watched(k, v, k_cache, v_cache, slot_mapping) else ops.write_kv
    write(k, v, k_cache, v_cache, slot_mapping)


__all__ = ["Plan", "attention", "merge_states", "ops", "plan", "write_kv"]
