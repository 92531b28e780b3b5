"""Launch of the plan's builder."""

from torch import Tensor

from uniattn.kernels.plan import plan_kernel
from uniattn.launch.target import on_device
from uniattn.schedule.plan import MAX_CUT_TILES, MIN_PIECE_TOKENS, RECORD_INTS, PlanSpec
from uniattn.schedule.tiles import cdiv

_OWN = 16


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
    with on_device(buffer.device):
        plan_kernel[(cdiv(spec.num_tiles, _OWN),)](
            buffer, buffer[(1 + spec.num_items) * RECORD_INTS :], cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq,
            spec.num_seqs, spec.num_seqs.bit_length(), spec.num_tokens, spec.num_tiles, spec.num_kv_heads, spec.num_slots,
            spec.item_overhead, spec.num_splits, kv_capacity, spec.window_left, spec.window_right, CAUSAL=spec.causal == 1,
            GROUP=spec.num_q_heads // spec.num_kv_heads, PAGED=paged, BLOCK_M=spec.block_m, BLOCK_N=spec.block_n,
            SMALL_M=spec.small_m, SMALL_N=spec.small_n, MAY_SPLIT=spec.num_partials > 0, MIN_PIECE=MIN_PIECE_TOKENS,
            CHUNK=256 if spec.num_tiles <= 256 else MAX_CUT_TILES, OWN=_OWN, num_warps=8,
        )  # fmt: skip
