"""Tile sizes: what they are, which can be compiled, and what they take of a chip's shared memory. `uniattn.tuning` chooses."""

import functools
from dataclasses import dataclass
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


def broken_rule(t: Tiles) -> tuple[str, str] | None:
    """The first field of `t` that the kernels cannot be compiled for, and what it must be; None where all will do."""

    def is_int(x: Any, least: int) -> bool:
        return type(x) is int and x >= least

    def is_power(x: Any, least: int) -> bool:
        return is_int(x, least) and x & (x - 1) == 0

    small = t.small_m != 0
    rules = {
        "block_m": (is_power(t.block_m, 16), "must be a power of two, at least 16"),
        "block_n": (is_power(t.block_n, 16), "must be a power of two, at least 16"),
        "num_stages": (is_int(t.num_stages, 1), "must be an int, at least 1"),
        "num_warps": (is_power(t.num_warps, 1) and t.num_warps <= 32, "must be a power of two, at most 32"),
        "small_m": (
            not small or (is_power(t.small_m, 16) and t.small_m < t.block_m),
            "must be 0, or a power of two, at least 16 and less than block_m",
        ),
        "small_n": (not small or is_power(t.small_n, 16), "must be a power of two, at least 16, where small_m is not 0"),
        "small_stages": (is_int(t.small_stages, 1 if small else 0), "must be an int, at least 1 where small_m is not 0"),
        "programs_per_sm": (is_int(t.programs_per_sm, 1), "must be an int, at least 1"),
        "item_overhead": (is_int(t.item_overhead, 0), "must be an int, at least 0"),
        "kernel": (t.kernel in ("triton", "hopper"), "must be triton or hopper"),
    }
    return next(((name, limit) for name, (right, limit) in rules.items() if not right), None)


# What `shared_bytes` may fall short of Triton's own allocation.
SHARED_MARGIN = 2048


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


def shared_bytes(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, matrix_unit: str, paged: bool) -> int:
    """About what Triton allocates for `t`: mostly to the byte, rarely up to `SHARED_MARGIN` short. The larger of its two loops."""
    facts = (head_dim, v_head_dim, itemsize, matrix_unit, paged)
    large = loop_bytes(t.block_m, t.block_n, t.num_stages, *facts)
    return max(large, loop_bytes(t.small_m, t.small_n, t.small_stages, *facts)) if t.small_m else large


def loop_bytes(m: int, n: int, stages: int, head_dim: int, v_head_dim: int, itemsize: int, matrix_unit: str, paged: bool) -> int:
    """`shared_bytes` of one loop.

    Paged loops load page ids a stage ahead, so they keep `(stages - 1) // 2` buffers of K and V, AMD's `stages - 2`, and contiguous
    ones `stages - 1`. A unit that reads shared memory on its own (wgmma, tcgen05) keeps one more in tiles of 64 rows and more.
    """
    d, dv = sum(dim_parts(head_dim)), next_power_of_2(max(16, v_head_dim))
    amd = matrix_unit == "mfma"
    own = m >= 64 and matrix_unit in ("wgmma", "tcgen05")
    buffers = stages - 1 if not paged else stages - 2 if amd else (stages - 1) // 2
    # Page ids, 8 bytes a KV token and buffer; AMD's lie in shared memory with three stages alone.
    ids = 8 * n * (stages == 3 if amd else {"wgmma": 2, "tcgen05": 4}[matrix_unit] if own else stages)
    # Weights that must change their layout for the second product.
    weights = m * n * itemsize if itemsize == 4 or (amd and m >= 64) or (matrix_unit == "mma" and m > 16) else 0
    total = (max(1, buffers) + own) * n * (d + dv) * itemsize + ids + weights
    # AMD holds Q in registers, and turns the output of large tiles around in shared memory.
    return max(total, m * dv * itemsize if m >= 64 else 0) if amd else total + m * d * itemsize


def num_tiles(num_tokens: int, num_seqs: int, group: int, block_m: int) -> int:
    """Bound of the tiles of any batch of these sizes, as `kernels.plan` numbers them."""
    return num_tokens * group // block_m + num_seqs + 1
