"""Launch of the plan's builder."""

from typing import NamedTuple

import torch
from torch import Tensor

from uniattn.kernels.plan import plan_kernel
from uniattn.launch.cache import Kernels, Source
from uniattn.launch.target import on_index
from uniattn.schedule import hopper
from uniattn.schedule.plan import MAX_CUT_TILES, MIN_PIECE_TOKENS, PlanSpec, halves
from uniattn.schedule.tiles import cdiv

_OWN = 8


class Key(NamedTuple):
    """All that the builder's binary depends on: dtypes of what it reads, None where it is absent, and what a tile's cost is.

    `heads_first`, `interleave` and `l2_tokens` give the order of records (`kernels.plan._places`).
    `chunk` is how many tiles a program holds at once; a plan that may cut tiles holds them all.
    """

    device: int
    cu_seqlens_q: torch.dtype
    seqlens_k: torch.dtype | None
    cu_seqlens_k: torch.dtype | None
    causal_per_seq: torch.dtype | None
    causal: bool
    group: int
    paged: bool
    block_m: int
    block_n: int
    small_m: int
    small_n: int
    heads_first: bool
    interleave: bool
    l2_tokens: int
    may_cut: bool
    chunk: int


def source(key: Key) -> Source:
    """What is compiled for a key, or for its plain tuple."""
    k = Key(*key)
    return Source(
        device=k.device,
        pointers=dict(
            items_ptr=torch.int32, cu_seqlens_q_ptr=k.cu_seqlens_q, seqlens_k_ptr=k.seqlens_k, cu_seqlens_k_ptr=k.cu_seqlens_k,
            causal_ptr=k.causal_per_seq,
        ),
        numbers=dict.fromkeys(
            ("first_tile", "num_counters", "num_seqs", "search_steps", "num_tokens", "num_tiles", "num_kv_heads", "num_slots",
             "item_overhead", "forced_splits", "kv_capacity", "window_left", "window_right"), "i32",
        ),
        constants=dict(
            CAUSAL=k.causal, GROUP=k.group, PAGED=k.paged, BLOCK_M=k.block_m, BLOCK_N=k.block_n, SMALL_M=k.small_m,
            SMALL_N=k.small_n, HEADS_FIRST=k.heads_first, INTERLEAVE=k.interleave, L2_TOKENS=k.l2_tokens, MAY_SPLIT=k.may_cut,
            MIN_PIECE=MIN_PIECE_TOKENS, HALVES=halves(k.interleave), CHUNK=k.chunk, OWN=_OWN,
        ),
        divisors={},
        options=dict(num_warps=8),
    )  # fmt: skip


KERNELS = Kernels(plan_kernel, source)


def chunks(may_cut: bool) -> tuple[int, ...]:
    """The chunks that a plan may need, each for at most as many tiles; what is not cut takes the largest as often as it needs."""
    return (256, MAX_CUT_TILES) if may_cut else (MAX_CUT_TILES,)


def l2_tokens(interleave: bool | int, head_dim: int, v_head_dim: int, itemsize: int) -> int:
    """KV tokens of one head that the builder may count on in L2; 0 where the order does not ask."""
    return hopper.L2_BYTES // hopper.token_bytes(head_dim, v_head_dim, itemsize) if interleave else 0


def build(
    spec: PlanSpec,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal_per_seq: Tensor | None,
    paged: bool,
    kv_capacity: int,
    buffer: Tensor,
) -> None:
    """Write the plan's items and tiles into `buffer`, int32 of at least `spec.buffer_ints`.

    `kv_capacity` is the KV tokens that a row of the page table, or contiguous K/V, holds.
    """
    index = buffer.get_device()
    may_cut = spec.num_partials > 0
    num_tiles, num_seqs = spec.num_tiles, spec.num_seqs
    sizes = chunks(may_cut)
    launch = KERNELS[
        index, cu_seqlens_q.dtype, None if seqlens_k is None else seqlens_k.dtype,
        None if cu_seqlens_k is None else cu_seqlens_k.dtype, None if causal_per_seq is None else causal_per_seq.dtype,
        spec.causal == 1, spec.num_q_heads // spec.num_kv_heads, paged, spec.block_m, spec.block_n, spec.small_m, spec.small_n,
        bool(spec.heads_first), bool(spec.is_hopper), l2_tokens(spec.is_hopper, spec.head_dim, spec.v_head_dim, spec.itemsize),
        may_cut, sizes[0] if num_tiles <= sizes[0] else sizes[-1],
    ]  # fmt: skip
    with on_index(index):
        launch(
            (cdiv(num_tiles, _OWN), 1, 1),
            (buffer, cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq),
            (
                spec.first_tile, spec.num_counters, num_seqs, num_seqs.bit_length(), spec.num_tokens, num_tiles,
                spec.num_kv_heads, spec.num_slots, spec.item_overhead, spec.num_splits, kv_capacity, spec.window_left,
                spec.window_right,
            ),
        )  # fmt: skip
