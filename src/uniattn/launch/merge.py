"""Launch of the merge kernels: of any parts, and of the pieces that a plan cut."""

from typing import NamedTuple

import torch
from torch import Tensor

from uniattn.kernels.merge import merge_kernel, merge_pieces_kernel
from uniattn.launch.cache import Kernels, Source
from uniattn.launch.target import on_index
from uniattn.schedule.plan import PlanSpec
from uniattn.schedule.tiles import cdiv, next_power_of_2


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


class PiecesKey(NamedTuple):
    """All that the binary of the pieces' merge depends on; `aligned`: out's address and strides are multiples of 16 bytes."""

    device: int
    dtype: torch.dtype
    cu_seqlens_q: torch.dtype
    has_lse: bool
    aligned: bool
    group: int
    dim: int
    block_m: int
    rows: int


# What `rows` may be.
ROWS = (1, 8)


def rows_a_program(max_rows: int) -> int:
    """Rows of a program: few with many pieces in decode, many with few pieces in prefill; 16 rows of pieces at once in either."""
    return ROWS[max_rows > 16]


def pieces_source(key: PiecesKey) -> Source:
    """What is compiled for a key, or for its plain tuple."""
    k = PiecesKey(*key)
    divisors = dict(partial_out_ptr=16, partial_lse_ptr=16)
    if k.aligned:
        divisors.update(out_ptr=16, out_strides=16 // k.dtype.itemsize)
    return Source(
        device=k.device,
        pointers=dict(
            partial_out_ptr=torch.float32, partial_lse_ptr=torch.float32, out_ptr=k.dtype,
            lse_ptr=torch.float32 if k.has_lse else None, items_ptr=torch.int32, cu_seqlens_q_ptr=k.cu_seqlens_q,
        ),
        # The kernel's offsets are 64 bits anyway.
        numbers=dict(
            out_strides=("i64",) * 2,
            **dict.fromkeys(("first_tile", "num_tokens", "num_seqs", "num_kv_heads", "row_blocks"), "i32"),
        ),
        constants=dict(
            GROUP=k.group, DIM=k.dim, DV=next_power_of_2(max(16, k.dim)), PART_ROWS=k.block_m, BLOCK_P=16 // k.rows, ROWS=k.rows
        ),
        divisors=divisors,
        options=dict(num_warps=4),
    )  # fmt: skip


PIECES_KERNELS = Kernels(merge_pieces_kernel, pieces_source)


def merge_pieces(
    spec: PlanSpec, items: Tensor, partial_out: Tensor, partial_lse: Tensor, cu_seqlens_q: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Merge the pieces of the plan's cut tiles into `out` and `lse`; `items` is the plan's buffer."""
    o0, o1, _ = out.stride()
    num_tokens, num_kv_heads = spec.num_tokens, spec.num_kv_heads
    if num_tokens == 1:
        o0 = 0  # a lone token's stride may be anything, and does not count
    dtype = out.dtype
    rows = rows_a_program(spec.max_rows)
    row_blocks = cdiv(spec.max_rows, rows)
    index = out.get_device()
    launch = PIECES_KERNELS[
        index, dtype, cu_seqlens_q.dtype, lse is not None, (out.data_ptr() | (o0 | o1) * dtype.itemsize) & 15 == 0,
        spec.num_q_heads // num_kv_heads, spec.v_head_dim, spec.block_m, rows,
    ]  # fmt: skip
    with on_index(index):
        launch(
            (spec.num_tiles * num_kv_heads * row_blocks, 1, 1),
            (partial_out, partial_lse, out, lse, items, cu_seqlens_q),
            (o0, o1, spec.first_tile, num_tokens, spec.num_seqs, num_kv_heads, row_blocks),
        )
