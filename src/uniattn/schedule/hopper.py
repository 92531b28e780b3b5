"""What the Hopper kernel serves, and its tiles: pure functions of shapes and strides."""

import math

from torch import Tensor

from uniattn.launch.target import Target
from uniattn.schedule.tiles import Tiles, next_power_of_2

# Rows of a tile, and of one of its two consumers: sequences of no more rows than one takes are the plan's small items.
TILE_ROWS = 128
CONSUMER_ROWS = 64
NUM_CONSUMERS = 2
SMALLEST_DIM, LARGEST_DIM = 33, 256
# Rows that one TMA copy must bring at least, for the swizzle's eight rows.
SMALLEST_BOX = 8
# Of a consumer's 232 registers a thread, those that its accumulators may take: 256 dims with blocks of 64 take 176.
_ACCUMULATOR_REGISTERS = 184
# K/V that items may read at once, so that L2 (50 MB) serves a sequence's tiles after the first; `kernels.plan.L2_BYTES`.
L2_BYTES = 32 << 20


def token_bytes(head_dim: int, v_head_dim: int, itemsize: int) -> int:
    """K and V of a token and head."""
    return (head_dim + v_head_dim) * itemsize


def padded(head_dim: int) -> int:
    """The power of two that a head dim takes in shared memory."""
    return next_power_of_2(head_dim)


def box_tokens(page_size: int, block_n: int) -> int:
    """KV tokens that one TMA copy brings: never across a page's end."""
    return math.gcd(page_size, block_n)


def serves(k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None) -> bool:
    """Whether TMA can read these caches, and the kernel their heads."""
    return page_table is not None and readable(k_cache, v_cache)


def readable(k_cache: Tensor, v_cache: Tensor) -> bool:
    """16 bits, pages of at least 16 tokens in multiples of 8, head dims of whole 16 bytes, and strides that TMA takes."""
    page_size = k_cache.shape[1]
    return (
        k_cache.element_size() == 2
        and page_size >= 16
        and page_size % SMALLEST_BOX == 0
        and all(SMALLEST_DIM <= x.shape[-1] <= LARGEST_DIM and x.shape[-1] % 8 == 0 and _addressable(x) for x in (k_cache, v_cache))
    )


def rows_in_reach(token_stride: int, head_stride: int, group: int) -> bool:
    """Whether 32 bits hold the offset of any row of a tile from its first; `stride`s of q in elements."""
    return TILE_ROWS * token_stride + group * head_stride < 1 << 31


def _addressable(cache: Tensor) -> bool:
    """TMA's strides are whole 16 bytes, less than 2^40 of them, and its sizes less than 2^32."""
    strides = [s for s, n in zip(cache.stride(), cache.shape, strict=True) if n > 1][:-1]
    return all(s * 2 % 16 == 0 and 0 < s * 2 < 1 << 40 for s in strides) and cache.shape[0] < 1 << 31


def choose(head_dim: int, v_head_dim: int) -> Tiles:
    """The kernel's tiles: 128 rows in two consumers, blocks of 128 tokens, of 64 for wide heads, whose K/V fill shared memory."""
    wide = max(padded(head_dim), padded(v_head_dim)) > 128
    block_n = 64 if wide else 128
    return Tiles(
        TILE_ROWS, block_n, 2, 8, CONSUMER_ROWS, block_n, 2, programs_per_sm=1, item_overhead=384, kernel="hopper"
    )  # fmt: skip


def fault(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, paged: bool, target: Target) -> str | None:
    """Why the kernel cannot run with the tiles `t` on `target`, None where it can. `t` can be compiled, as far as sizes tell."""
    if target.backend != "cuda" or target.arch != 90:
        return f"the hopper kernel runs on Hopper alone, and {target.name} is {target.arch}"
    if not paged or itemsize != 2 or not all(SMALLEST_DIM <= dim <= LARGEST_DIM and dim % 8 == 0 for dim in (head_dim, v_head_dim)):
        return f"the hopper kernel serves paged 16-bit K/V, head dims {SMALLEST_DIM} to {LARGEST_DIM} in multiples of 8"
    like = Tiles(
        TILE_ROWS, t.block_n, t.num_stages, 8, CONSUMER_ROWS, t.block_n, t.num_stages, programs_per_sm=1, item_overhead=t.item_overhead,
        kernel="hopper",
    )  # fmt: skip
    if t != like:
        return f"the hopper kernel's tiles differ in block_n, num_stages and item_overhead alone; these would be {like}"
    shared = shared_bytes(t, head_dim, v_head_dim)
    if shared > target.max_shared_bytes:
        return f"it takes {shared} bytes of shared memory; a program may have {target.max_shared_bytes}"
    registers = consumer_registers(t, v_head_dim)
    if registers > _ACCUMULATOR_REGISTERS:
        return f"accumulators and weights take {registers} registers a thread; {_ACCUMULATOR_REGISTERS} may go to them"
    return None


def shared_bytes(t: Tiles, head_dim: int, v_head_dim: int) -> int:
    """Shared memory of a program, rounded up: tiles of Q, blocks of K and V, and less than 1 KB of barriers."""
    d, dv = padded(head_dim), padded(v_head_dim)
    return 2 * (q_stages(head_dim, v_head_dim) * TILE_ROWS * d + t.num_stages * t.block_n * (d + dv)) + 1024


def consumer_registers(t: Tiles, v_head_dim: int) -> int:
    """Registers of a consumer's thread that its accumulator, scores (fp32) and weights (16 bits) take."""
    return CONSUMER_ROWS * (padded(v_head_dim) + t.block_n + t.block_n // 2) // 128


def q_stages(head_dim: int, v_head_dim: int) -> int:
    """Tiles of Q in shared memory: the next item's comes during this one, where it fits."""
    return 1 if max(padded(head_dim), padded(v_head_dim)) > 128 else 2
