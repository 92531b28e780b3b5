"""Launch of the merge kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from uniattn.kernels.merge import merge_kernel
from uniattn.launch.cache import Kernels, Source
from uniattn.launch.target import on_index
from uniattn.schedule.tiles import next_power_of_2


class Key(NamedTuple):
    """All that the merge kernel's binary depends on; `aligned`: outs and out have addresses and strides of whole 16 bytes."""

    device: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    aligned: bool
    has_lse: bool
    dim: int


def source(key: Key) -> Source:
    """What is compiled for a key, or for its plain tuple."""
    k = Key(*key)
    divisors = dict(
        outs_ptr=16, out_ptr=16, outs_strides=16 // k.dtype.itemsize, out_strides=16 // k.out_dtype.itemsize
    ) if k.aligned else {}  # fmt: skip
    return Source(
        device=k.device,
        pointers=dict(
            outs_ptr=k.dtype, lses_ptr=torch.float32, out_ptr=k.out_dtype, lse_ptr=torch.float32 if k.has_lse else None
        ),
        # The kernel's offsets are 64 bits anyway.
        numbers=dict(
            outs_strides=("i64",) * 3, lses_strides=("i64",) * 3, out_strides=("i64",) * 2, lse_strides=("i64",) * 2,
            num_parts="i32", num_tokens="i32", num_heads="i32",
        ),
        constants=dict(DIM=k.dim, BLOCK_D=next_power_of_2(k.dim), BLOCK_P=16),
        divisors=divisors,
        options=dict(num_warps=4),
    )  # fmt: skip


KERNELS = Kernels(merge_kernel, source)


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Merge `outs` `[num_parts, num_tokens, num_heads, dim]` by `lses` `[num_parts, num_heads, num_tokens]` into `out`, `lse`."""
    num_parts, num_tokens, num_heads, dim = outs.shape
    if num_tokens == 0 or num_heads == 0:
        return
    s0, s1, s2, _ = outs.stride()
    o0, o1, _ = out.stride()
    if num_tokens == 1:
        o0 = 0  # a lone token's stride may be anything, and does not count
    dtype, out_dtype = outs.dtype, out.dtype
    bits = outs.data_ptr() | out.data_ptr() | (s0 | s1 | s2) * dtype.itemsize | (o0 | o1) * out_dtype.itemsize
    index = outs.get_device()
    with on_index(index):
        KERNELS[index, dtype, out_dtype, bits & 15 == 0, lse is not None, dim](
            (num_tokens * num_heads, 1, 1),
            (outs, lses, out, lse),
            (s0, s1, s2, *lses.stride(), o0, o1, *((0, 0) if lse is None else lse.stride()), num_parts, num_tokens, num_heads),
        )
