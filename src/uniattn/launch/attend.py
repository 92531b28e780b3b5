"""Launch of the portable kernel and, where the plan may have cut tiles, of the merge."""

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uniattn.kernels.triton.attend import attend_kernel
from uniattn.launch import choice
from uniattn.launch import merge as merge_launch
from uniattn.launch import plan as plan_launch
from uniattn.launch.cache import Kernels, Source
from uniattn.launch.target import interpreted, on_index, target_of
from uniattn.problem.layout import MAX_INT32, UNBOUNDED, kv_capacity
from uniattn.schedule import hopper as hopper_tiles
from uniattn.schedule.plan import PlanSpec, make_spec
from uniattn.schedule.tiles import dim_parts, next_power_of_2
from uniattn.tuning.heuristic import beside_hopper

LOG2E = math.log2(math.e)


class Key(NamedTuple):
    """All that the attention kernel's binary depends on.

    Attributes:
        device: index of the device, -1 for the interpreter.
        dtype: of q, K, V and the output.
        page_table ... alibi: dtypes of the small tensors in the kernel's order, None where one is absent.
        has_lse, has_partials: whether there is an LSE, and whether the plan may have cut tiles.
        aligned: addresses and strides of q, K, V and the output are multiples of 16 bytes, the widest load.
        wide: a stride needs 64 bits.
        same_strides: K's and V's strides are equal, so that one offset serves both.
        causal, has_window, has_softcap: features; their sizes are numbers at run time.
        head_dim, v_head_dim, group, page_size: page_size is 0 for contiguous K/V.
        tiles: `Tiles.compiled_in`.
    """

    device: int
    dtype: torch.dtype
    page_table: torch.dtype | None
    cu_seqlens_k: torch.dtype | None
    causal_per_seq: torch.dtype | None
    sinks: torch.dtype | None
    alibi: torch.dtype | None
    has_lse: bool
    has_partials: bool
    aligned: bool
    wide: bool
    same_strides: bool
    causal: bool
    has_window: bool
    has_softcap: bool
    head_dim: int
    v_head_dim: int
    group: int
    page_size: int
    tiles: tuple[Any, ...]


def source(key: Key) -> Source:
    """What is compiled for a key, or for its plain tuple, which is what a launch looks up: named tuples take longer to make."""
    k = Key(*key)
    block_m, block_n, num_stages, num_warps, small_m, small_n, small_stages, bulk = k.tiles
    stride = "i64" if k.wide else "i32"
    d0, d1 = dim_parts(k.head_dim)
    partials = torch.float32 if k.has_partials else None
    divisors = dict(partial_out_ptr=16, partial_lse_ptr=16)
    if k.aligned:
        elements = 16 // k.dtype.itemsize
        divisors.update(dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), 16))
        divisors.update(dict.fromkeys(("q_strides", "k_strides", "v_strides", "out_strides"), elements))
    return Source(
        device=k.device,
        # The small tensors carry no promise: engines pass slices of their buffers, and their loads would gain nothing.
        pointers=dict(
            q_ptr=k.dtype, k_ptr=k.dtype, v_ptr=k.dtype, out_ptr=k.dtype, lse_ptr=torch.float32 if k.has_lse else None,
            partial_out_ptr=partials, partial_lse_ptr=partials, items_ptr=torch.int32, page_table_ptr=k.page_table,
            cu_seqlens_k_ptr=k.cu_seqlens_k, causal_ptr=k.causal_per_seq, sinks_ptr=k.sinks, alibi_ptr=k.alibi,
        ),
        numbers=dict(
            q_strides=(stride,) * 2, k_strides=(stride,) * 3, v_strides=(stride,) * 3, out_strides=(stride,) * 2,
            **dict.fromkeys(
                ("page_table_stride", "kv_capacity", "num_tokens", "num_seqs", "num_kv_heads", "window_left", "window_right"), "i32"
            ),
            scale="fp32", softcap="fp32",
        ),
        constants=dict(
            CAUSAL=k.causal, HEAD_DIM=k.head_dim, V_HEAD_DIM=k.v_head_dim, D0=d0, D1=d1,
            DV=next_power_of_2(max(16, k.v_head_dim)), GROUP=k.group, PAGE_SIZE=k.page_size, SAME_STRIDES=k.same_strides,
            HAS_WINDOW=k.has_window, HAS_SOFTCAP=k.has_softcap, UPCAST=interpreted() and k.dtype == torch.bfloat16,
            BLOCK_M=block_m, BLOCK_N=block_n, NUM_STAGES=num_stages, SMALL_M=small_m, SMALL_N=small_n, SMALL_STAGES=small_stages,
            BULK=bulk,
        ),
        divisors=divisors,
        options=dict(num_warps=num_warps),
    )  # fmt: skip


KERNELS = Kernels(attend_kernel, source)


def classify(strides: tuple[int, ...], addresses: int, itemsize: int) -> tuple[bool, bool]:
    """`(aligned, wide)` of a key, from the strides of q, K, V and the output and their addresses or-ed together."""
    q0, q1, k0, k1, k2, v0, v1, v2, o0, o1 = strides
    bits = q0 | q1 | k0 | k1 | k2 | v0 | v1 | v2 | o0 | o1
    return (addresses | bits * itemsize) & 15 == 0, bits > MAX_INT32


def _effective_strides(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> tuple[int, ...]:
    """As `attend` collects strides, but 0 for dims of one element: a lone token or head may have any stride, and none counts."""
    strides: list[int] = []
    for x, count in ((q, 2), (k_cache, 3), (v_cache, 3), (out, 2)):
        own = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)][:-1]
        strides += [0] * (count - len(own)) + own
    return tuple(strides)


@functools.cache
def _hopper() -> ModuleType:
    """Imported late: Gluon is not interpreted, and other chips do not need it."""
    from uniattn.launch import hopper

    return hopper


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    causal_per_seq: Tensor | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    plan_spec: PlanSpec | None,
    plan_buffer: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of one batch into `out` and `lse`; arguments as `uniattn.ops.attend`. Without a plan it builds one."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = k_cache.shape[-2], v_cache.shape[-1]
    num_seqs = cu_seqlens_q.shape[0] - 1
    if num_tokens == 0:
        return
    if num_seqs == 0:
        # Padding alone, and no row of lengths or pages that a program could read.
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    dtype = q.dtype
    itemsize = dtype.itemsize
    if page_table is None:
        # Contiguous K/V has no pages: its token stride stands at the slot's place.
        page_size, page_table_stride, offsets_k = 0, 0, cu_seqlens_k
        strides = (*q.stride()[:2], 0, *k_cache.stride()[:2], 0, *v_cache.stride()[:2], *out.stride()[:2])
    else:
        page_size, page_table_stride, offsets_k = k_cache.shape[1], page_table.stride(0), None
        strides = (*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2])
    addresses = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr() | out.data_ptr()
    aligned, wide = classify(strides, addresses, itemsize)
    if not aligned or wide:
        strides = _effective_strides(q, k_cache, v_cache, out)
        aligned, wide = classify(strides, addresses, itemsize)
    capacity = kv_capacity(k_cache, page_table)
    spec, items = plan_spec, plan_buffer
    if spec is None or items is None:
        spec = make_spec(
            num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, v_head_dim, itemsize,
            2 if causal_per_seq is not None else int(causal), window_left, window_right, max_seqlen_q, page_size, target_of(q.device),
            choice.kernels(k_cache, v_cache, page_table, alibi_slopes is not None),
        )  # fmt: skip
        items = cu_seqlens_q.new_empty(spec.buffer_ints, dtype=torch.int32)
        plan_launch.build(
            spec, cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq, page_table is not None, capacity, items
        )  # fmt: skip

    partial_out = partial_lse = None
    if spec.num_partials:
        parts = spec.num_partials * num_kv_heads
        partial_out = q.new_empty((parts, spec.block_m, next_power_of_2(max(16, v_head_dim))), dtype=torch.float32)
        partial_lse = q.new_empty((parts, spec.block_m), dtype=torch.float32)
    has_softcap = softcap > 0
    if has_softcap:
        scale, cap = softmax_scale / softcap, softcap * LOG2E
    else:
        scale, cap = softmax_scale * LOG2E, 0.0
    if (
        # The plan may come from caches of other pages than this call's.
        spec.is_hopper and aligned and alibi_slopes is None and hopper_tiles.serves(k_cache, v_cache, page_table)
        and hopper_tiles.rows_in_reach(strides[0], strides[1], num_q_heads // num_kv_heads)
    ):  # fmt: skip
        assert page_table is not None
        _hopper().attend(
            spec, items, q, k_cache, v_cache, page_table, causal, causal_per_seq, scale, cap, sinks, capacity, out, lse, partial_out,
            partial_lse,
        )  # fmt: skip
        return
    choice.refuse_other_than_hopper()
    index = q.get_device()
    launch = KERNELS[
        index, dtype, None if page_table is None else page_table.dtype, None if offsets_k is None else offsets_k.dtype,
        None if causal_per_seq is None else causal_per_seq.dtype, None if sinks is None else sinks.dtype,
        None if alibi_slopes is None else alibi_slopes.dtype, lse is not None, partial_out is not None, aligned, wide,
        strides[2:5] == strides[5:8], causal, window_left != UNBOUNDED, has_softcap, head_dim, v_head_dim,
        num_q_heads // num_kv_heads, page_size,
        beside_hopper(head_dim, v_head_dim, itemsize, target_of(q.device)).compiled_in if spec.is_hopper else spec.compiled_in,
    ]  # fmt: skip
    with on_index(index):
        launch(
            (spec.num_records, 1, 1),
            (q, k_cache, v_cache, out, lse, partial_out, partial_lse, items, page_table, offsets_k, causal_per_seq, sinks,
             alibi_slopes),
            (*strides, page_table_stride, capacity, num_tokens, num_seqs, num_kv_heads, window_left, window_right, scale, cap),
        )  # fmt: skip
    if partial_out is not None:
        assert partial_lse is not None
        merge_launch.merge_pieces(spec, items, partial_out, partial_lse, cu_seqlens_q, out, lse)
