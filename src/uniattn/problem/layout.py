"""Numbers that stand for 'no limit', and how windows and the room for K/V are told to the kernels."""

from torch import Tensor

# Larger than any position and small enough that position + UNBOUNDED fits an int32.
UNBOUNDED = 1 << 30
MAX_INT32 = 2**31 - 1


def window_bounds(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """`(left, right)` in tokens, inclusive, with None and -1 turned into `UNBOUNDED`."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    left, right = (UNBOUNDED if w is None or w == -1 else min(w, UNBOUNDED) for w in window)
    return left, right


def kv_capacity(k_cache: Tensor, page_table: Tensor | None) -> int:
    """KV tokens that a row of the page table, or contiguous K/V, holds, as an int32 of the kernels.

    More than any int32 length is out of reach anyway, so what a wide table or cache holds beyond is not counted.
    """
    return min(k_cache.shape[0] if page_table is None else page_table.shape[1] * k_cache.shape[1], MAX_INT32)


def causal_code(causal: bool | Tensor) -> int:
    """0 no, 1 yes, 2 for each sequence."""
    return 2 if isinstance(causal, Tensor) else int(causal)
