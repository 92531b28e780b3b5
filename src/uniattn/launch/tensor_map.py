"""TMA descriptors of K/V caches, made once for each cache: the driver takes microseconds for one, and a cache lives for long."""

from typing import Any

import torch
from torch import Tensor

# CUtensorMapDataType of cuda.h.
_CUDA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_MOST = 4096

_made: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def of_cache(cache: Tensor, box: int, padded_dim: int) -> tuple[Any, ...]:
    """What a launch passes for a cache `[num_pages, page_size, num_kv_heads, dim]`, read as `[pages, heads, slots, dim]` in boxes of
    `box` slots and `padded_dim` elements: the map, its sizes, its strides in elements."""
    key = (cache.data_ptr(), cache.dtype, cache.shape, cache.stride(), box, padded_dim)
    made = _made.get(key)
    if made is None:
        # A map holds an address and no tensor, so an entry of a cache that is gone does no harm but take room.
        if len(_made) >= _MOST:
            _made.clear()
        made = _made[key] = _make(cache, box, padded_dim)
    return made


def _make(cache: Tensor, box: int, padded_dim: int) -> tuple[Any, ...]:
    import triton

    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    num_pages, page_size, num_heads, dim = cache.shape
    item = cache.element_size()
    width = min(128, padded_dim * item)
    # A lone page or head may have any stride, which TMA would not take.
    whole = dim * num_heads * page_size
    page, slot, head = (s if n > 1 else whole for s, n in zip(cache.stride()[:3], (num_pages, page_size, num_heads), strict=True))
    sizes, strides = [num_pages, num_heads, page_size, dim], [page, head, slot, 1]
    zeros = 0
    tensor_map = fill(cache.data_ptr(), _SWIZZLES[width], item, _CUDA_TYPES[cache.dtype], [1, 1, box, width // item], sizes, strides, zeros)
    return (tensor_map, *sizes, *strides)
