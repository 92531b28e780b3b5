"""Tiles from a chip's facts, where no table of measurements answers: pure functions."""

import functools
from dataclasses import replace

from uniattn.launch.target import Target
from uniattn.schedule.tiles import SHARED_MARGIN, Tiles, dim_parts, loop_bytes, next_power_of_2, shared_bytes, smem_bytes

# Sequences of at most this many query rows are tiled alike; the last class has no bound.
ROW_CLASSES = (16, 64)
# From the request for a block of K/V to its arrival, on a busy chip.
MEMORY_LATENCY_S = 1e-6


def choose(rows: int, head_dim: int, v_head_dim: int, itemsize: int, target: Target, paged: bool = True) -> Tiles:
    """Tiles for sequences that bring about `rows` query rows (query tokens x group) each, from the chip's facts.

    - The matrix unit decides block sizes and warps: what a thread's registers hold without spills.
    - A program's shared memory bounds stages and blocks (`_fit`).
    - An SM's shared memory bounds the programs that live on it, which the plan counts on; few-row tiles, which live from bytes in
      flight, give up stages before programs, as far as the memory's bandwidth allows (`_live`).
    - The number of SMs comes in with the plan, which cuts tiles to fill them.

    Where a comment names spills, `scripts/compile_all.py` shows them.
    """
    matrix_unit = target.matrix_unit
    d = max(sum(dim_parts(head_dim)), next_power_of_2(max(16, v_head_dim)))
    few, medium = ROW_CLASSES
    if itemsize == 4:
        # IEEE fp32 products run on the plain cores: larger tiles, or a second loop beside the masked one, spill registers.
        # 576 dims spill 11 times beside `mma`'s 163 KB of shared memory unless eight warps share them.
        warps = 8 if d > 512 and matrix_unit == "mma" else 4
        tiles = Tiles(16, 32 if d <= 128 else 16, 3, warps, 0, 0, 0, False, 4 if d <= 128 else 2, True, 32)
    elif rows <= few or (matrix_unit == "mma" and d > 256):
        # 32 tokens a step leave registers for four programs an SM: 515 us on 64 decodes of 8192; 64 tokens, three programs: 647.
        # `mma` holds Q in registers too: 32 rows of 512 dims spill 343 times in the loop.
        tiles = Tiles(16, 32 if d <= 256 else 16, 7, 4, 0, 0, 0, False, 4 if d <= 128 else 2, True, 32)
    elif d > 256:
        # Two loops spill (wgmma: 101 times), and but for wgmma so do 32 tokens a step (tcgen05: 40 times, mfma: 36).
        # A small-tile loop beside 576 dims spills too on tcgen05 (30 times).
        alone = matrix_unit == "tcgen05" and d > 512
        small = (0, 0, 0) if alone else (16, 16, 5)
        tiles = Tiles(64, 32 if matrix_unit == "wgmma" else 16, 3 if alone else 5, 8, *small, False, 1, rows <= medium)
    elif matrix_unit == "mma" and d > 128:
        # 64 rows spill up to 328 times in the loop.
        tiles = Tiles(32, 32, 5, 4, 16, 32, 5, True, 2, rows <= medium)
    elif rows <= medium:
        # `mma`: 64 tokens a step spill 72 times in the loop, 32 beside a second loop twice.
        narrow = matrix_unit == "mma" and d > 64
        tiles = Tiles(64, 64 if d <= 128 and not narrow else 32, 5, 4 if d <= 128 else 8, 16, 32, 5, not narrow, 2 if d <= 128 else 1, True)
    else:
        block_n = 64 if d <= 128 else 32
        # 32 tokens a step spill 3 times.
        tiles = Tiles(128, 16 if matrix_unit == "mfma" and d > 192 else block_n, 5, 8, 16, block_n, 5)
    return _live(_fit(tiles, head_dim, v_head_dim, itemsize, target, paged), head_dim, v_head_dim, itemsize, target)


def every(head_dim: int, v_head_dim: int, itemsize: int, target: Target, paged: bool = True) -> list[Tiles]:
    """All that `choose` can answer for these dims, whatever the number of rows; few rows first."""
    answers = (choose(rows, head_dim, v_head_dim, itemsize, target, paged) for rows in (1, *ROW_CLASSES, 1 << 20))
    return list(dict.fromkeys(answers))


@functools.cache
def beside_hopper(head_dim: int, v_head_dim: int, itemsize: int, target: Target) -> Tiles:
    """The portable kernel's tiles for a plan made for the Hopper kernel, where a call has what that one lacks (ALiBi, odd strides)."""
    d = max(sum(dim_parts(head_dim)), next_power_of_2(max(16, v_head_dim)))
    block_n = 64 if d <= 128 else 32
    return _fit(Tiles(128, block_n, 5, 8, 64, block_n, 5), head_dim, v_head_dim, itemsize, target, paged=True)


def _fit(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, target: Target, paged: bool) -> Tiles:
    """`t` with fewer stages, then shorter KV blocks, until it fits in shared memory."""

    def needed(m: int, n: int, stages: int) -> int:
        bound = smem_bytes(m, n, stages, head_dim, v_head_dim, itemsize)
        if paged or target.backend == "cpu":
            return bound
        # The buffer more that wgmma keeps: 64 x 32 tiles of 512 dims would take 262144 bytes.
        return max(bound, loop_bytes(m, n, stages, head_dim, v_head_dim, itemsize, target.matrix_unit, paged) + SHARED_MARGIN)

    def shrink(m: int, n: int, stages: int) -> tuple[int, int]:
        while needed(m, n, stages) > target.max_shared_bytes:
            if stages > 2:
                stages -= 1
            elif n > 16:
                n //= 2
            elif stages > 1:
                stages -= 1
            else:
                break
        return n, stages

    block_n, stages = shrink(t.block_m, t.block_n, t.num_stages)
    small_n, small_stages = shrink(t.small_m, t.small_n, t.small_stages) if t.small_m else (0, 0)
    return replace(t, block_n=block_n, num_stages=stages, small_n=small_n, small_stages=small_stages)


def _live(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, target: Target) -> Tiles:
    """`t` with as many programs an SM as its shared memory lets live, at most those that `t` counts for the registers' sake.

    Tiles of few rows drop to fewer stages rather than to fewer programs, as long as the K/V in flight covers what the memory
    delivers to an SM within its latency. Larger tiles keep their stages: 3 instead of 5 cost prefill 24% on an H200. Contiguous K/V
    counts as paged.
    """

    def counted(stages: int) -> int:
        shared = shared_bytes(replace(t, num_stages=stages), head_dim, v_head_dim, itemsize, target.matrix_unit, True)
        return min(t.programs_per_sm, target.programs_per_sm(shared, t.num_warps, 0))

    if t.block_m > ROW_CLASSES[0]:
        return replace(t, programs_per_sm=max(1, counted(t.num_stages)))
    block_bytes = t.block_n * (sum(dim_parts(head_dim)) + next_power_of_2(max(16, v_head_dim))) * itemsize
    needed = (target.memory_bytes_per_s or 0) / target.num_sms * MEMORY_LATENCY_S
    # Most programs first, then most stages.
    choices = [(counted(stages), stages) for stages in range(t.num_stages, 1, -1)] or [(counted(t.num_stages), t.num_stages)]
    covering = [(n, stages) for n, stages in choices if n * max(1, (stages - 1) // 2) * block_bytes >= needed]
    programs, stages = max(covering or choices)
    return replace(t, num_stages=stages, programs_per_sm=max(1, programs))
