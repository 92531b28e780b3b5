"""Tile sizes for a problem, from the chip's facts: pure functions, no measurement table yet."""

import functools
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """One launch configuration of a kernel: `kernel` is "triton", the portable one, or "hopper" (`schedule.hopper`).

    `block_m` rows (query tokens x group) by `block_n` KV tokens a step; `small_m` > 0 adds the small-tile loop for
    sequences of at most that many rows. `bulk` separates unmasked blocks from masked ones;
    `programs_per_sm` is how many live on an SM at once; `heads_first` runs a sequence's heads together;
    `item_overhead` is what starting an item and writing its partial costs, in KV tokens.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    small_m: int = 0
    small_n: int = 0
    small_stages: int = 0
    bulk: bool = True
    programs_per_sm: int = 1
    heads_first: bool = False
    item_overhead: int = 256
    kernel: str = "triton"

    @functools.cached_property
    def compiled_in(self) -> tuple[Any, ...]:
        """What a binary is made for, as a launch's key holds it: a plain tuple is hashed without a Python call."""
        return (
            self.block_m, self.block_n, self.num_stages, self.num_warps, self.small_m, self.small_n, self.small_stages,
            bool(self.bulk),
        )  # fmt: skip


# Sequences of at most this many query rows are tiled alike; the last class has no bound.
ROW_CLASSES = (16, 64)


def dim_parts(head_dim: int) -> tuple[int, int]:
    """`head_dim` as a power of two plus a padded power of two or 0: 192 is 128 + 64, 80 is 64 + 16, 576 is 512 + 64.

    Padding 576 to 1024 would nearly double the product and its shared memory. A product needs at least 16 in each part.
    """
    first = 1 << (head_dim.bit_length() - 1)
    if head_dim <= 16:
        return 16, 0
    if first == head_dim:
        return first, 0
    rest = next_power_of_2(max(16, head_dim - first))
    return (2 * first, 0) if rest >= first else (first, rest)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def smem_bytes(tiles_m: int, tiles_n: int, stages: int, head_dim: int, v_head_dim: int, itemsize: int) -> int:
    """Upper bound of one loop's shared memory: Q once, K and V a buffer, page ids and reductions rounded up.

    Page ids come a load before K and V, so that paged loops of `stages` keep about half as many K/V buffers; contiguous ones keep
    one less than `stages`.
    """
    d = sum(dim_parts(head_dim))
    dv = next_power_of_2(max(16, v_head_dim))
    return itemsize * (tiles_m * d + max(1, stages - 1) * tiles_n * (d + dv)) + 8192


def choose(rows: int, head_dim: int, v_head_dim: int, itemsize: int, smem_limit: int, matrix_unit: str = "wgmma") -> Tiles:
    """Tiles for sequences that bring about `rows` query rows (query tokens x group) each; `matrix_unit` as `Target` has it.

    Where a comment names spills, `scripts/compile_all.py` shows them.
    """
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
    return _fit(tiles, head_dim, v_head_dim, itemsize, smem_limit)


@functools.cache
def beside_hopper(head_dim: int, v_head_dim: int, itemsize: int) -> Tiles:
    """The portable kernel's tiles for a plan made for the Hopper kernel, where a call has what that one lacks (ALiBi, odd strides)."""
    d = max(sum(dim_parts(head_dim)), next_power_of_2(max(16, v_head_dim)))
    block_n = 64 if d <= 128 else 32
    return _fit(Tiles(128, block_n, 5, 8, 64, block_n, 5), head_dim, v_head_dim, itemsize, 232448)


def every(head_dim: int, v_head_dim: int, itemsize: int, smem_limit: int, matrix_unit: str = "wgmma") -> list[Tiles]:
    """All that `choose` can answer for these dims, whatever the number of rows; few rows first."""
    answers = (choose(rows, head_dim, v_head_dim, itemsize, smem_limit, matrix_unit) for rows in (1, *ROW_CLASSES, 1 << 20))
    return list(dict.fromkeys(answers))


def _fit(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, smem_limit: int) -> Tiles:
    """`t` with fewer stages, then shorter KV blocks, until it fits in shared memory."""

    def shrink(m: int, n: int, stages: int) -> tuple[int, int]:
        while smem_bytes(m, n, stages, head_dim, v_head_dim, itemsize) > smem_limit:
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


def num_tiles(num_tokens: int, num_seqs: int, group: int, block_m: int) -> int:
    """Bound of the tiles of any batch of these sizes, as `kernels.plan` numbers them."""
    return num_tokens * group // block_m + num_seqs + 1


__all__ = ["Tiles", "cdiv", "choose", "dim_parts", "every", "next_power_of_2", "num_tiles", "smem_bytes"]
