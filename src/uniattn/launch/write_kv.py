"""Launch of the K/V write."""

from typing import NamedTuple

import torch
from torch import Tensor

from uniattn.kernels.write_kv import write_kv_kernel
from uniattn.launch.cache import Kernels, Source
from uniattn.launch.target import on_index
from uniattn.schedule.tiles import cdiv, next_power_of_2


class Key(NamedTuple):
    """All that the binary of the K/V write depends on; `aligned`: all addresses and strides are multiples of 16 bytes."""

    device: int
    dtype: torch.dtype
    slot_dtype: torch.dtype
    aligned: bool
    head_dim: int
    v_head_dim: int
    page_size: int
    block: int


def source(key: Key) -> Source:
    """What is compiled for a key, or for its plain tuple."""
    k = Key(*key)
    tensors = ("k", "v", "k_cache", "v_cache")
    divisors = {}
    if k.aligned:
        divisors = {f"{name}_ptr": 16 for name in tensors} | {f"{name}_strides": 16 // k.dtype.itemsize for name in tensors}
    return Source(
        device=k.device,
        pointers={**{f"{name}_ptr": k.dtype for name in tensors}, "slot_mapping_ptr": k.slot_dtype},
        # The kernel's offsets are 64 bits anyway.
        numbers=dict(
            k_strides=("i64",) * 2, v_strides=("i64",) * 2, k_cache_strides=("i64",) * 3, v_cache_strides=("i64",) * 3,
            slot_stride="i64", num_slots="i64", num_heads="i32",
        ),
        constants=dict(HEAD_DIM=k.head_dim, V_HEAD_DIM=k.v_head_dim, PAGE_SIZE=k.page_size, BLOCK=k.block),
        divisors=divisors,
        options=dict(num_warps=4),
    )  # fmt: skip


KERNELS = Kernels(write_kv_kernel, source)


def block_elements(num_heads: int, head_dim: int, v_head_dim: int) -> int:
    """Elements of a token's K or V that one program copies."""
    return min(1024, next_power_of_2(num_heads * max(head_dim, v_head_dim)))


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `k`, `v` `[num_tokens, num_kv_heads, dim]` into the slots of `slot_mapping` `[num_tokens]`; below 0 is skipped."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    v_head_dim, dtype = v.shape[-1], k.dtype
    num_pages, page_size = k_cache.shape[:2]
    block = block_elements(num_heads, head_dim, v_head_dim)
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    aligned = _aligned(strides, k, v, k_cache, v_cache)
    if not aligned:
        # A lone token or head may have any stride, and none counts.
        strides = tuple(
            0 if size == 1 else stride for x in (k, v, k_cache, v_cache) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
        aligned = _aligned(strides, k, v, k_cache, v_cache)
    index = k.get_device()
    with on_index(index):
        KERNELS[index, dtype, slot_mapping.dtype, aligned, head_dim, v_head_dim, page_size, block](
            (num_tokens, cdiv(num_heads * max(head_dim, v_head_dim), block), 1),
            (k, v, k_cache, v_cache, slot_mapping),
            (*strides, slot_mapping.stride(0), num_pages * page_size, num_heads),
        )


def _aligned(strides: tuple[int, ...], k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9 = strides
    bits = (s0 | s1 | s2 | s3 | s4 | s5 | s6 | s7 | s8 | s9) * k.dtype.itemsize
    return (bits | k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) & 15 == 0
